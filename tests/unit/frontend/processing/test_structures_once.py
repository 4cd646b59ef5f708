"""Each structure of answers is read once, however many prompts have it."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.structured_output import backend_xgrammar

from common.request_plane.card import WorkerCard
from common.vllm_compat.structures_once import ReadingOnce
from frontend.processing.renderer import build_config, build_renderer

STRUCTURES: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"json": '{"type": "array"}'},
    {"json": {"items": {"type": "integer", "multipleOf": 2}}},  # guidance reads it
    {"json": {"type": "object", "patternProperties": {"a": {}}, "properties": {}}},
    {"json_object": True},
    {"regex": "a|b"},
    {"regex": "("},
    {"choice": ["yes", "no"]},
    {"choice": []},
    {"grammar": 'root ::= "a"'},
    {"grammar": "root ::= nothing"},
    {"json": "{"},
]


@pytest.fixture(scope="module")
def processors(card: WorkerCard, serve_args: Namespace) -> Iterator[list[InputProcessor]]:
    """Return vLLM's own, and ours."""
    renderer, config = build_renderer(card, serve_args), build_config(card, serve_args)
    yield [InputProcessor(config, renderer), ReadingOnce(config, renderer)]
    renderer.shutdown()


def read(processor: InputProcessor, structure: dict[str, Any]) -> object:
    """Return what becomes of a structure: the error, or all of its attributes."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**structure))
    try:
        request = processor.process_inputs("r", tokens_input([1]), params, ("generate",))
    except VLLMValidationError as error:
        return str(error)
    assert request.sampling_params is not None
    assert vars(request.sampling_params.structured_outputs) == vars(params.structured_outputs)
    return vars(params.structured_outputs)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_it_becomes_what_vllm_makes_of_it(
    processors: list[InputProcessor], structure: dict[str, Any]
) -> None:
    plain, ours = processors
    assert read(plain, structure) == read(ours, structure) == read(ours, structure)


@pytest.mark.parametrize("structure", [STRUCTURES[0], {"regex": "[a"}], ids=str)
def test_the_second_prompt_costs_nothing(
    processors: list[InputProcessor], structure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = processors
    first = read(ours, structure)
    monkeypatch.delattr(backend_xgrammar, "validate_xgrammar_grammar")
    assert read(ours, structure) == first
    with pytest.raises(ImportError):
        read(ours, {"regex": "another"})

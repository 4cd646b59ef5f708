"""Every argument of vLLM's engine, and every variable that its processing reads, has one place."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import vllm
from pydantic import BaseModel
from vllm import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from common.request_plane.card import WorkerCard
from common.vllm_compat import engine_arguments
from tests.by_version import NOT_HERE
from tests.unit.common import engine_environment

PROCESSING = (
    "multimodal",
    "renderers",
    "tokenizers",
    "transformers_utils",
    "inputs",
    "reasoning",
    "tool_parsers",
    "parser",
    "sampling_params.py",
    "config/model.py",
    "config/multimodal.py",
    "model_executor/models/registry.py",
    "v1/engine/input_processor.py",
    "v1/core/kv_cache_utils.py",
    "v1/structured_output",
)
"""What of vLLM reads requests, makes tokens, media and hashes, or is asked how to."""

VARIABLE = re.compile(r"envs\.(VLLM_\w+)|os\.getenv\(\"((?:VLLM|PYTHON)\w+)\"")


def arguments() -> set[str]:
    parser = FlexibleArgumentParser()
    AsyncEngineArgs.add_cli_args(parser)
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    return fields | {action.dest for action in parser._actions} - {"help"}


def variables() -> set[str]:
    root = Path(vllm.__file__).parent
    files = [
        file
        for place in PROCESSING
        for file in ([root / place] if place.endswith(".py") else (root / place).rglob("*.py"))
    ]
    assert len(files) > 100
    found: set[str] = set()
    for file in files:
        for ours, python in VARIABLE.findall(file.read_text()):
            found.add(ours or python)
    return found


def check_one_place(known: set[str], *places: Iterable[str]) -> None:
    times = {name: sum(name in place for place in places) for name in known}
    wrong = {
        "nobody thought of these": {name for name, count in times.items() if count == 0},
        "in several places": {name for name, count in times.items() if count > 1},
        "vLLM has no such": {name for place in places for name in place} - known - NOT_HERE,
        "vLLM has it already": known & NOT_HERE,
    }
    assert not any(wrong.values()), wrong


def test_every_argument_is_in_one_place() -> None:
    check_one_place(
        arguments(),
        engine_arguments.ON_CARD,
        engine_arguments.REFUSED,
        engine_arguments.IRRELEVANT,
    )


def test_every_variable_of_processing_is_in_one_place() -> None:
    check_one_place(variables(), engine_environment.ON_CARD, engine_environment.IRRELEVANT)


@pytest.mark.parametrize("places", [engine_arguments.ON_CARD, engine_environment.ON_CARD])
def test_what_is_on_the_card_is_there(places: Mapping[str, str]) -> None:
    for place in places.values():
        section: object = WorkerCard
        for name in place.split("."):
            assert isinstance(section, type) and issubclass(section, BaseModel), place
            section = section.model_fields[name].annotation

"""A structure for one backend leaves the other backend to other structures."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from backend_worker.engine.slow_structures import WatchedGrammar
from backend_worker.engine.vllm_faults import structure_backends
from tests.unit.backend_worker.configured import ours

pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")

XGRAMMAR = {"xgrammar": 'root ::= "yes" | "no"'}
GUIDANCE = {"guidance": 'start: "a"+ "b"'}


@pytest.fixture
def manager(model: Path) -> StructuredOutputManager:
    assert StructuredOutputManager.grammar_init is structure_backends.grammar_init
    return StructuredOutputManager(ours([f"--model={model}"]))


def asked(manager: StructuredOutputManager, structure: dict[str, str]) -> Any:
    """Return the compiled grammar of a structure that vLLM gave to a backend."""
    [(backend, grammar)] = structure.items()
    wanted = StructuredOutputsParams(grammar=grammar)
    wanted._backend = backend
    params = SamplingParams(structured_outputs=wanted)
    structured: Any = StructuredOutputRequest.from_sampling_params(params)
    request: Any = SimpleNamespace(
        request_id="one", sampling_params=params, structured_output_request=structured
    )
    manager.grammar_init(request)
    return structured._grammar.result()


@pytest.mark.parametrize("first", [XGRAMMAR, GUIDANCE])
def test_each_structure_has_its_own(
    manager: StructuredOutputManager, first: dict[str, str]
) -> None:
    asked(manager, first)
    grammars = [asked(manager, each) for each in (GUIDANCE, XGRAMMAR, GUIDANCE)]
    kinds = [GuidanceGrammar, WatchedGrammar, GuidanceGrammar]
    assert [type(each) for each in grammars] == kinds
    assert manager.backend is not None
    mask = manager.backend.allocate_token_bitmask(len(grammars))
    for row, grammar in enumerate(grammars):
        grammar.fill_bitmask(mask, row)
    assert mask[0].equal(mask[2]) and not mask[0].equal(mask[1])


def test_masks_of_another_width_are_refused(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(manager, XGRAMMAR)
    narrow = GuidanceBackend.allocate_token_bitmask
    monkeypatch.setattr(
        GuidanceBackend, "allocate_token_bitmask", lambda *args: narrow(*args).repeat(1, 2)
    )
    with pytest.raises(VLLMValidationError, match="for guidance"):
        asked(manager, GUIDANCE)
    assert type(asked(manager, XGRAMMAR)) is WatchedGrammar

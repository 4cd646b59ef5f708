"""Every architecture that vLLM has is either held against plain vLLM or has a reason why not."""

from vllm.model_executor.models import registry as vllm_registry

from tests.by_version import since_033
from tests.families.catalog import CASES, NEWER, registry
from tests.families.makers import ELSEWHERE, MAKERS
from tests.families.unbuilt import UNBUILT


def test_no_architecture_of_vllm_is_forgotten() -> None:
    known = registry()
    assert known.keys() == vllm_registry._MULTIMODAL_MODELS.keys()
    assert not UNBUILT.keys() - known.keys(), "no such architecture"
    newer = {name for name, why in known.items() if why == NEWER}
    assert bool(newer) == since_033(True, False)
    assert {name for name, why in known.items() if why} - newer == UNBUILT.keys(), (
        "built and unbuilt"
    )


def test_each_case_has_a_maker() -> None:
    makers = {case.maker for case in CASES.values()} | {case.draft for case in CASES.values()}
    assert makers - {""} <= MAKERS.keys() | {"demo"}


def test_each_maker_is_asked_for() -> None:
    used = {case.maker for case in CASES.values()} | {case.draft for case in CASES.values()}
    assert MAKERS.keys() - used == ELSEWHERE

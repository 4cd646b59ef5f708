"""What a misspelt variable comes to: it is told, and so is what was meant."""

import pytest

from backend_worker import args as worker
from common.stray_variables import stray_variables
from frontend import args as frontend

SIDES = {
    "frontend": (frontend.GROUPS, frontend._is_vllms),
    "worker": (worker.GROUPS, worker._is_vllms),
}


def said(side: str, **environ: str) -> list[str]:
    groups, vllms = SIDES[side]
    return stray_variables(groups, vllms, environ)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("MMROUTER_ROUTER_MOD", "MMROUTER_ROUTER_MODE"),
        ("MMROUTER_MAX_INFLIHGT", "MMROUTER_MAX_INFLIGHT"),
        ("MMROUTER_MAX_INFLIGHTS", "MMROUTER_MAX_INFLIGHT"),
        ("MMROUTER_REQUEST_TIMEOUT_S", "MMROUTER_REQUEST_TIMEOUT"),
        ("MMROUTER_FLEETKEY_FILE", "MMROUTER_FLEET_KEY_FILE"),
    ],
)
def test_the_nearest_is_told_and_no_value(name: str, near: str) -> None:
    assert said("frontend", **{name: "value"}) == [f"{name} does nothing; did you mean {near}?"]
    assert said("frontend", **{near: "value"}) == said("frontend", **{name: ""}) == []


def test_flags_of_vllms_have_no_variable_of_ours() -> None:
    (sentence,) = said("frontend", MMROUTER_PORT="9000")
    assert sentence == "MMROUTER_PORT does nothing: --port is vLLM's and has no variable here"
    assert "--max-model-len" in said("worker", MMROUTER_MAX_MODEL_LEN="9")[0]
    assert said("worker", MMROUTER_PORT="9000") == []


def test_what_kubernetes_sets_for_a_service_of_this_name_is_nobodys_mistake() -> None:
    place = "tcp://10.0.0.1:8000"
    names = ["PORT", "PORT_8000_TCP", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP"]
    names += ["PORT_8000_TCP_ADDR", "PORT_8000_TCP_PORT", "PORT_8000_TCP_PROTO"]
    for side in SIDES:
        assert said(side, **{f"MMROUTER_{name}": place for name in names}) == []


@pytest.mark.parametrize("side", list(SIDES))
def test_what_the_other_side_reads_is_no_mistake(side: str) -> None:
    """A launch script hands one environment to all."""
    everybodys = (*frontend.GROUPS, *worker.GROUPS)
    names = {group.variable(name) for group in everybodys for name in group.declared()}
    names.remove("MMROUTER_TRUST_REMOTE_CODE")  # which workers have as a flag only
    assert said(side, **dict.fromkeys(names, "x"), MMROUTER_PYTHON="python3") == []

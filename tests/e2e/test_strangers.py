"""What strangers send to harm others, and what they get for it."""

import json
from typing import Any

import pytest

from tests.e2e.conftest import Endpoint

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hello"},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}},
}


def realised(router: Endpoint) -> float:
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in router.http.get("/metrics").text.splitlines()
        if line.startswith("mmrouter_realised_cached_tokens_total")
    )


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("cached", [-1, 10**12])
def test_no_client_says_what_was_computed_elsewhere(
    router: Endpoint, path: str, cached: int
) -> None:
    before = realised(router)
    there = {"do_remote_prefill": True, "remote_prefill_cached_tokens": cached}
    body = ASKED[path] | {"model": "demo", "kv_transfer_params": there, "temperature": 0}
    reply = router.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert 0 <= realised(router) - before < 100


ODD: list[dict[str, Any]] = [
    {"kv_transfer_params": {"do_remote_decode": True}},
    *(
        {"vllm_xargs": {"kv_transfer_params": value, "ec_transfer_params": value}}
        for value in ("text", 7, ["a"])
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("odd", ODD, ids=str)
def test_nothing_comes_of_what_it_is_either(
    router: Endpoint, odd: dict[str, Any], stream: bool
) -> None:
    asked = CHAT | {"model": "demo", "stream": stream} | odd
    for _ in range(4):  # as many as would have had a worker ejected
        reply = router.http.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 200 and '"error"' not in reply.text, reply.text
        assert "remote_" not in reply.text
    assert {view["circuit"] for view in router.workers().values()} == {"closed"}


def test_many_wrong_items_are_told_as_few_are(router: Endpoint, plain: Endpoint) -> None:
    wrong = [{"type": "x"}]
    few = {"model": "demo", "input": wrong}
    many = {"model": "demo", "input": wrong * 2000}
    ours, theirs = (each.http.post("/v1/responses", json=few) for each in (router, plain))
    assert ours.status_code == theirs.status_code == 400
    reply = router.http.post("/v1/responses", json=many)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == theirs.json()["error"]["param"]


def test_a_structure_that_would_hold_everybody_up_is_refused(router: Endpoint) -> None:
    schema: dict[str, Any] = {"type": "array", "examples": ["v" * 20] * 10_000}
    for _ in range(50):
        schema = {"type": "array", "items": schema}
    asked = CHAT | {"model": "demo", "structured_outputs": {"json": schema}}
    reply = router.http.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 400
    assert "the structure of the answer" in reply.text


def test_no_structure_is_compiled_before_it_is_tried(router: Endpoint) -> None:
    names = [f"property {number}" for number in range(3000)]
    many = {"type": "object", "properties": {name: {} for name in names}, "minProperties": 1500}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": many}}
    patterns = many | {"patternProperties": {"^a": {}}}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": patterns}}
    for wanted in (
        {"response_format": tag},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        {"structured_outputs": {"json": patterns}},
        {"response_format": schema},
    ):
        reply = router.http.post("/v1/chat/completions", json=CHAT | {"model": "demo"} | wanted)
        assert reply.status_code == 400
        assert "the structure of the answer" in reply.text


def test_a_batch_of_chats_is_answered(router: Endpoint) -> None:
    chats = [[{"role": "user", "content": f"What is {number}?"}] for number in range(40)]
    asked = {"model": "demo", "messages": chats, "max_tokens": 4}
    reply = router.http.post("/v1/chat/completions/batch", json=asked)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 40

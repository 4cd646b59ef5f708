"""Wrong inputs of ``/v1/responses`` are cut behind the first of them."""

import json
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.requests import Request
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from frontend.asgi import Message
from frontend.http import large_json
from frontend.http.responses_input import FEW, cut_behind_wrong, is_long

RIGHT: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
]
WRONG = {"type": "x"}


@pytest.mark.parametrize("count", [FEW + 1, 100, 101])
def test_what_is_right_stays_as_it_is(count: int) -> None:
    body = {"model": "m", "input": [RIGHT[number % len(RIGHT)] for number in range(count)]}
    assert cut_behind_wrong(body) is body
    ResponsesRequest.model_validate(body)


@pytest.mark.parametrize("place", [0, 5, FEW, 59, 99])
def test_what_is_wrong_is_cut_soon_behind_that(place: int) -> None:
    items = [*([RIGHT[0]] * place), *([WRONG] * 3000)]
    body = {"model": "m", "input": items, "temperature": 0.5}
    cut = cut_behind_wrong(body)
    assert body["input"] is items and cut | {"input": items} == body
    assert place < len(cut["input"]) <= place + FEW
    with pytest.raises(ValidationError) as refused:
        ResponsesRequest.model_validate(cut)
    assert any(place in error["loc"] for error in refused.value.errors())  # as of the whole


@pytest.mark.parametrize("body", [[], "x", {}, {"input": "x" * 100}, {"input": [WRONG] * FEW}])
def test_others_are_not_looked_at(body: Any) -> None:
    assert not is_long(body)


def asked(path: str, body: Any) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [],
        "server": ("frontend", 80), "scheme": "http", "root_path": "",
    }  # fmt: skip
    return Request(scope, receive)


@pytest.mark.parametrize("path", ["/v1/responses", "/prefix/v1/responses"])
async def test_bodies_of_that_route_come_so(path: str) -> None:
    items = [WRONG] * 100
    assert len((await large_json._json(asked(path, {"input": items})))["input"]) == FEW
    other = await large_json._json(asked("/v1/embeddings", {"input": items}))
    assert len(other["input"]) == 100

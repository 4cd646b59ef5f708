"""Wrong items by the thousand cost as much as one, on every route of vLLM's server."""

import logging
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from openai.types.responses import ResponseOutputMessage
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest

from frontend.args import parse
from frontend.gate.fail_fast import collections_in, fail_fast

MAX_ERRORS = 1000
"""As many as members of unions make of one wrong item; 10,000 items made over a million."""

WRONG: list[dict[str, Any]] = [{}] * 10_000
NAMED: dict[str, Any] = {str(number): [] for number in range(10_000)}
EMBEDDED = [{"content": [{"type": "image_embeds", "image_embeds": dict.fromkeys(NAMED, 1)}]}]
MESSAGE = {
    "id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [],
}  # fmt: skip
PARTS = [{"role": "user", "content": WRONG}] * 10


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatCompletionRequest, {"messages": WRONG}),
        (ChatCompletionRequest, {"messages": [], "tools": WRONG}),
        (BatchChatCompletionRequest, {"messages": [WRONG] * 3}),
        (RerankRequest, {"query": "x", "documents": EMBEDDED}),
        (CompletionRequest, {"prompt": WRONG[:1000]}),
        (CompletionRequest, {"prompt": "x", "logit_bias": NAMED}),
        (ResponsesRequest, {"input": WRONG}),
        (ResponsesRequest, {"input": PARTS}),
        (ResponsesRequest, {"input": {str(number): {} for number in range(10_000)}}),
        (ResponsesRequest, {"input": "x", "tools": WRONG}),
        (AnthropicMessagesRequest, {"model": "m", "max_tokens": 1, "messages": WRONG}),
        (TypeAdapter(EmbeddingRequest), {"messages": WRONG}),
        (TypeAdapter(TokenizeRequest), {"messages": WRONG}),
    ],
)
def test_wrong_items_cost_as_much_as_one(model: Any, body: dict[str, Any]) -> None:
    fail_fast()
    adapter = TypeAdapter(model) if isinstance(model, type) else TypeAdapter(model._type)
    with pytest.raises(ValidationError) as refused:
        adapter.validate_python(body)
    assert refused.value.error_count() < MAX_ERRORS


@pytest.mark.parametrize("model", [ChatCompletionRequest, EmbeddingRequest, TokenizeRequest])
def test_errors_of_parts_write_no_input_down(model: Any) -> None:
    fail_fast()
    adapter = TypeAdapter[Any](model)
    part = {"type": "image_url", "image_url": {"url": "secret", "detail": 1}}
    request = adapter.validate_python({"messages": [{"role": "user", "content": [part]}]})
    with pytest.raises(ValidationError) as refused:
        list(request.messages[0]["content"])
    assert "detail" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_member_of_a_union_that_was_used_before_costs_no_more() -> None:
    """``openai`` builds the validators of its models at their first use."""
    ResponseOutputMessage.model_validate(MESSAGE)
    fail_fast()
    with pytest.raises(ValidationError) as refused:
        ResponsesRequest.model_validate({"input": PARTS})
    assert refused.value.error_count() < MAX_ERRORS


@pytest.mark.parametrize(
    "task", ["generate", "embed", "classify", "token_classify", "transcription"]
)
def test_no_route_validates_lists_and_objects_to_their_end(task: str) -> None:
    """Also those that the next vLLM adds: a module that is missing in the list is found here."""
    fail_fast()
    args = parse([]).serve
    args.enable_scale_out = True
    slow = {
        path
        for path, field in bodies(build_app(args, (task,)))
        for collection in collections_in(field._type_adapter.core_schema)
        if not collection.get("fail_fast")
    }
    assert slow == set()


def bodies(app: FastAPI) -> list[tuple[str, Any]]:
    found = [
        (route.path, field)
        for route in app.routes
        if isinstance(route, APIRoute)
        for field in route.dependant.body_params
        if hasattr(field, "_type_adapter")
    ]
    assert found
    return found


@pytest.mark.parametrize("part", ["a", {"text": "a"}, {"type": "input_text", "text": "a"}])
def test_a_batch_drops_no_content_that_it_validates_twice(part: object) -> None:
    """Pydantic's iterators are empty at the second time, and its errors were swallowed."""
    fail_fast()
    message = {"role": "user", "content": [part]}
    batch = BatchChatCompletionRequest.model_validate({"messages": [[message]]})
    batch.to_chat_completion_request(batch.messages[0])
    assert batch.messages == [[message]]


def test_what_is_right_is_taken_as_before() -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hello"}] * 20,
        "stop": ["a", "b"],
    }
    body["request_id"] = "r"  # or each has one of its own
    before = ChatCompletionRequest.model_validate(body)
    fail_fast()
    fail_fast()
    assert ChatCompletionRequest.model_validate(body) == before


def test_parts_of_events_are_made_without_a_look_for_unknown_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail_fast()
    vllms = logging.getLogger("vllm")
    vllms.addHandler(caplog.handler)
    with caplog.at_level(logging.DEBUG, "vllm"):
        made = DeltaMessage.model_validate({"content": "a", "odd": 1})
        assert not caplog.records
        assert made.model_dump(exclude_unset=True) == {"content": "a", "odd": 1}
        with pytest.raises(ValidationError):
            DeltaMessage.model_validate({"content": 1})
        CompletionRequest.model_validate({"prompt": "x", "odd": 1})
        assert "odd" in caplog.text
    vllms.removeHandler(caplog.handler)

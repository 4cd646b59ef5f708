"""A request that fails while it streams: vLLM's routes for Anthropic and Responses say why."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError, GracefulHTTPError

from frontend.asgi import Door, Message, Receive, Scope, Send
from frontend.http.streaming.stream_errors import Messages, Responses, hold_stream_heads
from tests.by_version import since_033

LOST = GracefulHTTPError("worker w1 was lost", HTTPStatus.SERVICE_UNAVAILABLE)
ERROR: ErrorResponse = OpenAIServingResponses.create_error_response(LOST)


async def answered(events: AsyncIterator[str]) -> tuple[int, str]:
    """What a client gets of these events: status and body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in events:
            body = event.encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    await Door(app, [hold_stream_heads])({"type": "http"}, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body.decode()


def chunk(text: str) -> ChatCompletionStreamResponse:
    delta = {"role": "assistant", "content": text}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return ChatCompletionStreamResponse.model_validate(
        {"id": "c", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )


def messages(*items: BaseModel) -> AsyncIterator[str]:
    """Of Anthropic's route, for chunks of a chat."""

    async def chat() -> AsyncGenerator[Any]:
        for item in items:
            yield since_033(item, f"data: {item.model_dump_json()}\n\n")

    serving = Messages.__new__(Messages)  # nothing of it is used
    return serving.message_stream_converter(chat())


async def test_anthropics_clients_get_the_status() -> None:
    status, body = await answered(messages(ERROR))
    assert status == 503
    assert json.loads(body)["error"]["message"] == "worker w1 was lost"


async def test_anthropics_clients_get_an_event_of_theirs_later() -> None:
    status, body = await answered(messages(chunk(""), chunk("hi"), ERROR))
    assert status == 200
    assert body.startswith("event: message_start\n")
    said = body.rpartition("event: error\ndata: ")[2]
    assert json.loads(said) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "worker w1 was lost"},
    }
    assert "validation error" not in body


BEGIN = ("response.created", "response.in_progress")


@pytest.fixture
def responses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def stream(*kinds: str, fails: Exception | None) -> AsyncIterator[str]:
        async def original(*_: Any) -> AsyncGenerator[Any]:
            for number, kind in enumerate(kinds):
                dump = json.dumps({"type": kind, "sequence_number": number})
                yield SimpleNamespace(
                    type=kind, sequence_number=number, model_dump_json=lambda dump=dump, **_: dump
                )
            if fails is not None:
                raise fails

        monkeypatch.setattr(OpenAIServingResponses, "responses_stream_generator", original)
        serving = Responses.__new__(Responses)  # nothing else of it is used
        serving.enable_store = False
        asked: Any = SimpleNamespace(store=False)
        return _as_vllm_writes_them(serving.responses_stream_generator(asked, None, None, None))

    yield stream


async def _as_vllm_writes_them(events: AsyncIterator[Any]) -> AsyncIterator[str]:
    from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events

    async for event in _convert_stream_to_sse_events(events):
        yield event


@pytest.mark.parametrize(("fails", "status"), [(LOST, 503), (GenerationError("x"), 500)])
async def test_clients_of_responses_get_the_status(
    responses: Any, fails: Exception, status: int
) -> None:
    got, body = await answered(responses(*BEGIN, fails=fails))
    assert got == status
    assert json.loads(body)["error"]["code"] == status


async def test_clients_of_responses_get_an_event_later(responses: Any) -> None:
    status, body = await answered(responses(*BEGIN, "response.output_text.delta", fails=LOST))
    assert status == 200
    assert body.startswith("event: response.created\n")
    kinds = [line for line in body.splitlines() if line.startswith("event: ")]
    assert kinds[-2:] == ["event: response.output_text.delta", "event: error"]
    event = json.loads(body.rpartition("data: ")[2])
    assert (event["message"], event["code"], event["sequence_number"]) == (
        "worker w1 was lost",
        "503",
        3,
    )


async def test_a_response_that_ends_well_is_as_it_was(responses: Any) -> None:
    kinds = (*BEGIN, "response.output_text.delta", "response.completed")
    _, body = await answered(responses(*kinds, fails=None))
    assert [line for line in body.splitlines() if line.startswith("event: ")] == [
        f"event: {kind}" for kind in kinds
    ]


async def test_what_nobody_expected_is_not_hidden(responses: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        await answered(responses(*BEGIN, fails=ZeroDivisionError()))


async def test_an_error_that_vllm_makes_no_valid_event_of_is_raised() -> None:
    error = GenerationError("the engine failed")
    with pytest.raises(GenerationError) as caught:
        serving = Responses.__new__(Responses)
        serving._convert_generation_error_to_streaming_response(error)
    assert caught.value is error


async def test_messages_for_which_no_thread_starts_are_a_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def create(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(AnthropicServingMessages, "create_messages", create)
    with pytest.raises(GracefulHTTPError) as raised:
        await Messages.__new__(Messages).create_messages(None)
    assert raised.value.http_status == HTTPStatus.SERVICE_UNAVAILABLE

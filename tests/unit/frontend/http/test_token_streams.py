"""Events of streams that pass by the layers of the app, and what is echoed.

That streams have the bytes of vLLM's is tested in ``test_direct_streams.py``.
"""

import inspect
from argparse import Namespace
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams

from frontend.asgi import App, Door, Message, Receive, Scope, Send
from frontend.http.limits.connection import WRITE_NOW
from frontend.http.settings import HttpSettings
from frontend.http.streaming.stream_errors import hold_stream_heads
from frontend.http.streaming.token_streams import Chats, Completions, Tokens, own_streams
from frontend.request.answer_limits import MAX_LOGPROBS
from tests.unit.frontend.http.serving import post, serving

EVENTS = ["data: é\n\n", "data: 2\n\n", "data: 3\n\n", "data: [DONE]\n\n"]
ERROR = 'data: {"error": {"message": "no room", "type": "Busy", "param": null, "code": 503}}\n\n'
COMPLETION = SimpleNamespace(n=1, use_beam_search=False, echo=False)


class Layer:
    """A layer of the app, and what it saw."""

    def __init__(self, app: App, seen: list[Message]) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def see(message: Message) -> None:
            self._seen.append(message)
            await send(message)

        await self._app(scope, receive, see)


def made_app(
    monkeypatch: pytest.MonkeyPatch, events: list[str], *middleware: Middleware
) -> FastAPI:
    """An app of which vLLM's class for completions makes some events."""

    async def stream(*_: Any, **__: Any) -> AsyncGenerator[str]:
        for event in events:
            yield event

    async def answer(request: Request) -> StreamingResponse:
        serving = request.app.state.openai_serving_completion
        made = serving.completion_stream_generator(COMPLETION, ["prompt"])
        return StreamingResponse(made, media_type="text/event-stream")

    monkeypatch.setattr(OpenAIServingCompletion, "completion_stream_generator", stream)
    app = FastAPI(routes=[Route("/work", answer, methods=["POST"])], middleware=[*middleware])
    app.state.args = Namespace(sse_keep_alive_interval=7, other=1)
    app.state.openai_serving_chat = None
    app.state.openai_serving_completion = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    own_streams(app)
    return app


async def said_by(app: App, *, direct: bool = True) -> bytes:
    async def without(scope: Scope, receive: Receive, send: Send) -> None:
        if not direct:
            del scope[WRITE_NOW]
        await app(scope, receive, send)

    async with serving(without, HttpSettings()) as served:
        client = await served.connect()
        request = post().replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        await client.send(request)
        answer = await client.until_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    kept = [line for line in head.split(b"\r\n") if not line.startswith(b"date:")]
    return b"\r\n".join([*kept, b"", body])


@pytest.mark.parametrize("events", [EVENTS, EVENTS[:1], [], [ERROR, EVENTS[-1]]])
async def test_clients_get_the_same(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Also an error before the first event, behind which nothing may follow."""
    app = Door(made_app(monkeypatch, events), [hold_stream_heads])
    theirs, ours = [await said_by(app, direct=direct) for direct in (False, True)]
    assert ours == theirs
    assert ours.startswith(b"HTTP/1.1 503" if events[:1] == [ERROR] else b"HTTP/1.1 200")


async def test_layers_see_the_head_the_first_event_and_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Message] = []
    app = made_app(monkeypatch, EVENTS)
    assert b"3" in await said_by(Door(Layer(app, seen), [hold_stream_heads]))
    assert [message.get("body") for message in seen] == [None, EVENTS[0].encode(), b""]
    assert vars(app.state.args) == {"sse_keep_alive_interval": 0, "other": 1}


async def test_a_layer_that_nobody_knows_sees_all_events(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Message] = []
    middleware = Middleware(CORSMiddleware), Middleware(Layer, seen=seen)
    app = made_app(monkeypatch, EVENTS, *middleware)
    assert b"3" in await said_by(Door(app, [hold_stream_heads]))
    bodies = [message.get("body") for message in seen]
    assert bodies == [None, *(event.encode() for event in EVENTS), b""]
    assert app.state.args.sse_keep_alive_interval == 7


PARTS = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]


async def echoed(content: object, *, echo: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The last of the messages that vLLM's methods are given."""
    given: list[Any] = [] if content is None else [{"content": "x"}, {"content": content}]
    before = [dict(message) for message in given]
    last: list[Any] = []

    async def full(self: object, _: Any, __: Any, ___: Any, name: str, conversation: Any) -> None:
        last.append(conversation[-1]["content"] if conversation else None)

    async def stream(*args: Any) -> AsyncGenerator[str]:
        await full(*args)
        yield ""

    async def outputs() -> AsyncGenerator[Any]:
        yield SimpleNamespace(outputs=[])

    monkeypatch.setattr(OpenAIServingChat, "chat_completion_stream_generator", stream)
    monkeypatch.setattr(OpenAIServingChat, "chat_completion_full_generator", full)
    chats: Any = Chats.of(SimpleNamespace(), False, 0.0)
    request = SimpleNamespace(echo=echo, n=1, use_beam_search=False)
    args = request, outputs(), "id", "name", given
    assert [event async for event in chats.chat_completion_stream_generator(*args)] == [""]
    await chats.chat_completion_full_generator(*args)
    assert given == before
    return last


async def test_echo_makes_text_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await echoed(PARTS, echo=True, monkeypatch=monkeypatch) == ["one\ntwo"] * 2


@pytest.mark.parametrize("content", ["text", "", None])
async def test_all_else_stays(monkeypatch: pytest.MonkeyPatch, content: object) -> None:
    assert await echoed(content, echo=True, monkeypatch=monkeypatch) == [content] * 2


async def test_without_echo_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await echoed(PARTS, echo=False, monkeypatch=monkeypatch) == [PARTS] * 2


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Chats, "chat_completion_stream_generator"),
        (Chats, "chat_completion_full_generator"),
        (Chats, "_make_parser"),
        (Completions, "completion_stream_generator"),
    ],
)
def test_vllms_methods_take_the_same(kind: type, name: str) -> None:
    ours, theirs = (
        [*inspect.signature(getattr(each, name)).parameters] for each in (kind, kind.__bases__[1])
    )
    named = ours[: ours.index("args")]
    assert named == theirs[: len(named)]


@pytest.mark.parametrize("data", ["BQ==", "kA==", "wA==", "AA", "", "gaFhBQ=="])
async def test_media_that_are_none_are_their_clients_fault(
    monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    """Given to the route of tokens, in base64: a number, a list, nothing, no tensor at all."""

    async def original(_: object, asked: str) -> object:
        return decode_mm_kwargs_item(asked)

    monkeypatch.setattr(ServingTokens, "serve_tokens", original)
    with pytest.raises(VLLMValidationError, match="`kwargs_data` or `mm_metadata`"):
        await Tokens.__new__(Tokens).serve_tokens(data)


async def test_other_faults_are_no_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async def original(_: object) -> object:
        raise AttributeError("ours")

    monkeypatch.setattr(ServingTokens, "serve_tokens", original)
    with pytest.raises(AttributeError, match="ours"):
        await Tokens.__new__(Tokens).serve_tokens()


@pytest.mark.parametrize(
    ("beams", "steps", "tokens", "media", "taken"),
    [
        (4, 256, 8_000, 0, True),
        (2, 1 << 20, 1_000, 0, True),
        (16, 240, 20_000, 0, False),
        (10, 200, 1_000, 20, True),
        (10, 200, 1_000, 200, False),
    ],
)
@pytest.mark.parametrize("kind", [Chats, Completions])
async def test_a_beam_search_repeats_no_prompt_without_bound(
    kind: Any,
    beams: int,
    steps: int,
    tokens: int,
    media: int,
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def search(*_: object, **__: object) -> AsyncGenerator[str]:
        yield "found"

    monkeypatch.setattr(BeamSearchOnlineMixin, "beam_search", search)
    prompt = {"prompt_token_ids": [1] * tokens, "mm_placeholders": {"image": [None] * media}}
    params = BeamSearchParams(beam_width=beams, max_tokens=steps)
    found = object.__new__(kind).beam_search(prompt, "id", params)
    if taken:
        assert [each async for each in found] == ["found"]
        # Log probabilities of all candidates stay within the limit of one request.
        assert params.max_tokens * beams * (2 * beams + 1) <= MAX_LOGPROBS
    else:
        with pytest.raises(VLLMValidationError, match="send a shorter prompt"):
            await anext(found)

"""Events of streams that pass by the layers of vLLM's server."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.completion import api_router as completion

from frontend.asgi import App, Message, Receive, Scope, Send
from frontend.http.streaming import straight_streams
from frontend.http.streaming.early_stream_errors import EarlyStreamErrors
from frontend.http.streaming.straight_streams import StraightStream

EVENTS = ["data: é\n\n", "data: 2\n\n", "data: 3\n\n", "data: [DONE]\n\n"]
ERROR = 'data: {"error": {"message": "no room", "type": "Busy", "param": null, "code": 503}}\n\n'


class Layer:
    """A layer of the server, and what it saw."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.seen: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def see(message: Message) -> None:
            self.seen.append(message)
            await send(message)

        await self._app(scope, receive, see)


def streaming(kind: type[StreamingResponse], events: list[str]) -> Layer:
    async def body() -> AsyncIterator[str]:
        for event in events:
            yield event

    async def answer(request: Request) -> StreamingResponse:
        return kind(body(), media_type="text/event-stream")

    return Layer(Starlette(routes=[Route("/", answer)]))


async def said_by(app: App) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as http:
        return await http.get("/")


@pytest.mark.parametrize("events", [EVENTS, EVENTS[:1], [], [ERROR, EVENTS[-1]]])
@pytest.mark.parametrize("held", [True, False])
async def test_clients_get_the_same(events: list[str], held: bool) -> None:
    """Also an error before the first event, behind which nothing may follow."""
    answers, outer = [], []
    for kind in (StreamingResponse, StraightStream):
        layer = streaming(kind, events)
        outside = Layer(EarlyStreamErrors(layer) if held else layer)
        answers.append(await said_by(outside))
        outer.append(outside.seen)
    theirs, ours = answers
    assert ours.content == theirs.content
    assert (ours.status_code, ours.headers) == (theirs.status_code, theirs.headers)
    assert outer[0] == outer[1]


async def test_layers_see_the_head_the_first_event_and_the_end() -> None:
    layer = streaming(StraightStream, EVENTS)
    answer = await said_by(EarlyStreamErrors(layer))
    assert answer.text == "".join(EVENTS)
    assert [message.get("body") for message in layer.seen] == [None, EVENTS[0].encode(), b""]


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (chat, completion):
        monkeypatch.setattr(module, "StreamingResponse", StreamingResponse)
    yield


@pytest.mark.usefixtures("as_before")
def test_a_layer_that_nobody_knows_sees_all_events() -> None:
    straight_streams.install([Middleware(CORSMiddleware), Middleware(Layer)])
    assert chat.StreamingResponse is completion.StreamingResponse is StreamingResponse
    straight_streams.install([Middleware(CORSMiddleware)])
    assert chat.StreamingResponse is completion.StreamingResponse is StraightStream

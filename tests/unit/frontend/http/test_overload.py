"""The steps that refuse, and say when to come back, around apps of our own."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse

from common.errors import FleetBusyError, OverloadedError
from frontend.asgi import App, Door, overload_answer
from frontend.http.error_shapes import say_when_to_retry
from frontend.http.limits.admission import Admission
from frontend.http.settings import HttpSettings
from frontend.http.streaming.stream_errors import hold_stream_heads
from tests.waiting import until

ERROR = (
    b'data: {"error": {"message": "every worker is busy", "type": "Service Unavailable", '
    b'"param": null, "code": 503}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def client(app: App) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://frontend")


def streaming(*events: bytes) -> FastAPI:
    app = FastAPI()

    async def body() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(body(), media_type="text/event-stream", headers={"x-kept": "yes"})

    return app


class Workshop:
    """An app whose work ends when a test says so."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.started = 0
        self.done = asyncio.Event()

        @self.app.get("/health")
        async def health() -> str:
            return "fine"

        @self.app.post("/work")
        async def work(request: Request) -> str:
            self.started += 1
            await self.done.wait()
            return "done"

    async def until_started(self, count: int) -> None:
        await until(lambda: self.started >= count)


async def test_one_request_too_many_is_refused_while_health_answers() -> None:
    shop = Workshop()
    async with client(Door(shop.app, [Admission(HttpSettings(max_inflight=2))])) as http:
        busy = [asyncio.create_task(http.post("/work")) for _ in range(2)]
        await shop.until_started(2)
        refused = await http.post("/work")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == 429
        assert "no room for more requests in flight" in refused.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 200
        shop.done.set()
        assert [reply.status_code for reply in await asyncio.gather(*busy)] == [200, 200]
        assert (await http.post("/work")).status_code == 200


async def test_a_request_that_fails_or_is_cancelled_makes_room() -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise ValueError("broken")

    gate = Door(broken, [Admission(HttpSettings(max_inflight=1))])
    async with client(gate) as http:
        for _ in range(3):
            with pytest.raises(ValueError, match="broken"):
                await http.post("/work")
    shop = Workshop()
    async with client(Door(shop.app, [Admission(HttpSettings(max_inflight=1))])) as http:
        given_up = asyncio.create_task(http.post("/work"))
        await shop.until_started(1)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        shop.done.set()
        assert (await http.post("/work")).status_code == 200


async def test_a_stream_that_begins_with_an_error_is_an_error() -> None:
    async with client(Door(streaming(ERROR, DONE), [say_when_to_retry, hold_stream_heads])) as http:
        reply = await http.post("/stream")
    assert reply.status_code == 503
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["retry-after"] == "1"
    assert reply.headers["x-kept"] == "yes"
    assert reply.json()["error"]["message"] == "every worker is busy"


@pytest.mark.parametrize(
    "events",
    [
        (b'data: {"id": 1}\n\n', ERROR, DONE),
        (b": keep-alive\n\n", ERROR),
        (b'data: {"error": "not of this shape"}\n\n',),
        (b'data: {"error": {',),
        (),
    ],
)
async def test_any_other_stream_passes_unchanged(events: tuple[bytes, ...]) -> None:
    async with client(Door(streaming(*events), [hold_stream_heads])) as http:
        reply = await http.post("/stream")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.content == b"".join(events)


@pytest.mark.parametrize("status", [200, 400, 429, 500, 503])
async def test_only_429_and_503_say_when_to_come_back(status: int) -> None:
    app = FastAPI()

    @app.get("/")
    async def answer() -> JSONResponse:
        return JSONResponse({}, status)

    async with client(Door(app, [say_when_to_retry])) as http:
        reply = await http.get("/")
    assert reply.status_code == status
    assert ("retry-after" in reply.headers) == (status in (429, 503))


@pytest.mark.parametrize(
    ("error", "status", "seconds"),
    [
        (OverloadedError("full", retry_after_s=2.1), 429, "3"),
        (FleetBusyError("full", retry_after_s=0.0), 503, "1"),
    ],
)
async def test_an_error_that_knows_when_is_not_overruled(
    error: OverloadedError, status: int, seconds: str
) -> None:
    async with client(Door(overload_answer(error), [say_when_to_retry])) as http:
        reply = await http.get("/")
    assert reply.status_code == status
    assert reply.headers["retry-after"] == seconds

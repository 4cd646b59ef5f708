"""Streams through a real nginx: one that collects answers, and one that gives up early."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from frontend.asgi import Receive, Scope, Send
from frontend.http.settings import HttpSettings
from tests.e2e.clients.nginx import nginx
from tests.e2e.clients.programs import openai_sdk
from tests.e2e.clients.programs.outcomes import Endpoint as Given
from tests.e2e.conftest import Endpoint, Stack
from tests.e2e.processes import engine_pid, paused
from tests.unit.frontend.http.serving import serving
from tests.waiting import until

OF_OLD = "proxy_http_version 1.0;"
"""The default before nginx 1.29.7."""


class Talk:
    """An app whose second event comes when the first has arrived."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if scope["path"] == "/stream":
            await self.arrived.wait()
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})


@pytest.mark.parametrize("settings", ["", OF_OLD], ids=["1.1", "1.0"])
async def test_each_event_passes_at_once_where_answers_are_collected(
    tmp_path: Path, settings: str
) -> None:
    """The server answers in chunks, which nginx hands on as they come."""
    talk = Talk()
    async with serving(talk, HttpSettings()) as served:
        with nginx(tmp_path, f"http://127.0.0.1:{served.port}", settings) as proxy:
            await asyncio.to_thread(proxy.wait_for_status, 200)
            async with (
                httpx.AsyncClient(base_url=proxy.url, timeout=60) as http,
                http.stream("GET", "/stream") as reply,
            ):
                lines = reply.aiter_lines()
                assert await anext(lines) == "data: 1"
                talk.arrived.set()
                assert [line async for line in lines if line] == ["data: 2"]


@pytest.mark.parametrize(
    "name", ["a_stream_with_usage", "a_stream_about_a_picture", "a_response_in_a_stream"]
)
def test_an_sdk_sees_the_same_behind_it(behind: Given, ours: Given, name: str) -> None:
    call = openai_sdk.case.table[name]
    assert call(behind) == call(ours)


@pytest.fixture(scope="module")
def behind(ours: Given, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Given]:
    with nginx(tmp_path_factory.mktemp("nginx"), ours.url, OF_OLD) as proxy:
        proxy.wait_for_status(200)
        yield replace(ours, url=proxy.url)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_request_that_the_proxy_gives_up_is_aborted(
    stack: Stack, router: Endpoint, tmp_path: Path, stream: bool
) -> None:
    body = {
        "model": "demo",
        "prompt": "Once",
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": stream,
    }
    engines = [engine_pid(stack.discovery, name) for name in router.workers()]
    with nginx(tmp_path, stack.frontend.url, "proxy_read_timeout 1s;") as proxy:
        proxy.wait_for_status(200)
        with paused(*engines):
            reply = await asyncio.to_thread(
                httpx.post,
                f"{proxy.url}/v1/completions",
                json=body | {"stream": stream},
                timeout=60,
            )
            assert reply.status_code == 504
            await until(lambda: not any(w["active_requests"] for w in router.workers().values()))
    await until(lambda: not any(w["running"] for w in router.workers().values()))
    assert router.http.post("/v1/completions", json=body | {"max_tokens": 1}).status_code == 200

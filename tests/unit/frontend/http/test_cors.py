"""A page in a browser can read every answer, also those that vLLM's app has no part in."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware

from common.errors import NoWorkerError
from frontend.args import parse
from frontend.asgi import App
from frontend.door import make_door
from frontend.http.server.readiness_gate import ReadinessGate
from frontend.http.server.vllm_server import _drop_doubles
from frontend.http.settings import HttpSettings
from tests.unit.frontend.http.serving import Reply, Serving, behind_door, post, serving, with_body
from tests.waiting import until

PAGE = "http://app.test"
ORIGIN = f"Origin: {PAGE}"
KEY = "Authorization: Bearer sesam"
OF_PAGES = (f'--allowed-origins=["{PAGE}"]', "--enable-request-id-headers")


def layers(app: FastAPI) -> list[Any]:
    found: list[Any] = [app.middleware_stack]
    while (inner := getattr(found[-1], "app", None)) is not None:
        found.append(inner)
    return found


def vllms_app(*flags: str) -> FastAPI:
    """vLLM's own, without a model, as ours is made of it."""
    app = build_app(parse(list(flags)).serve, ("generate",), None)
    if app.middleware_stack is None:
        app.middleware_stack = app.build_middleware_stack()
    before = [type(layer) for layer in layers(app)]
    assert before.count(CORSMiddleware) == 1
    assert before.count(XRequestIdMiddleware) == ("--enable-request-id-headers" in flags)
    _drop_doubles(app)
    assert {type(layer) for layer in layers(app)}.isdisjoint({CORSMiddleware, XRequestIdMiddleware})
    return app


@asynccontextmanager
async def served(
    app: App, *flags: str, settings: HttpSettings | None = None
) -> AsyncIterator[Serving]:
    settings = settings or HttpSettings()
    async with serving(behind_door(app, *flags, settings=settings), settings, *flags) as server:
        yield server


def check(reply: Reply) -> None:
    """A page may read it."""
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "Retry-After" in reply.headers["access-control-expose-headers"]
    assert "Origin" in reply.headers["vary"]


async def test_all_that_is_refused_before_vllms_app_can_be_read_and_has_an_id() -> None:
    app = vllms_app("--api-key=sesam", *OF_PAGES)
    flags = ("--api-key=sesam", *OF_PAGES)
    async with served(app, *flags, settings=HttpSettings(max_body_mb=0.001)) as server:
        replies = {
            200: await server.ask(post(ORIGIN, KEY, method="GET", path="/version")),
            401: await server.ask(with_body(b"{}", ORIGIN)),
            403: await server.ask(post(ORIGIN, KEY, method="GET", path="/mmrouter/workers")),
            404: await server.ask(post(ORIGIN, KEY, method="GET", path="/nowhere")),
            413: await server.ask(post(ORIGIN, KEY, f"Content-Length: {1 << 40}")),
            415: await server.ask(with_body(b"{}", ORIGIN, KEY, "Content-Encoding: gzip")),
        }
    for status, reply in replies.items():
        assert reply.status == status
        check(reply)
        assert len(reply.headers["x-request-id"]) == 32


async def test_when_to_come_back_can_be_read() -> None:
    def nobody() -> None:
        raise NoWorkerError("no worker is available")

    door = make_door(parse([*OF_PAGES]), ReadinessGate(nobody))
    async with serving(door, HttpSettings(), *OF_PAGES) as server:
        reply = await server.ask(with_body(b"{}", ORIGIN, "X-Request-Id: mine"))
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert reply.headers["x-request-id"] == "mine"
    check(reply)


async def test_a_preflight_needs_no_key() -> None:
    flags = ("--api-key=sesam", *OF_PAGES)
    ask = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization")
    async with served(vllms_app(*flags), *flags) as server:
        reply = await server.ask(post(ORIGIN, *ask, method="OPTIONS", path="/v1/chat/completions"))
        other = await server.ask(post("Origin: http://evil.test", *ask, method="OPTIONS"))
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-allow-headers"] == "authorization"
    assert other.status == 400
    assert "access-control-allow-origin" not in other.headers


async def test_nothing_is_said_to_pages_that_are_not_allowed_and_no_id_unless_asked_for() -> None:
    async with served(vllms_app(OF_PAGES[0]), OF_PAGES[0]) as server:
        reply = await server.ask(
            with_body(b"{}", "Origin: http://evil.test", "Content-Encoding: x")
        )
    assert reply.status == 415
    assert "access-control-allow-origin" not in reply.headers
    assert "x-request-id" not in reply.headers


@pytest.mark.parametrize(
    ("flags", "origin"),
    [(('--allowed-origins=["*"]',), "*"), ((OF_PAGES[0],), PAGE)],
    ids=["any page", "one page"],
)
async def test_what_the_app_never_sees_can_be_read_too(flags: tuple[str, ...], origin: str) -> None:
    settings = HttpSettings(max_connections=1)
    async with served(vllms_app(*flags), *flags, settings=settings) as server:
        garbage = await server.ask(post(ORIGIN, "Transfer-Encoding: gzip, chunked"))
        assert garbage.status == 400
        assert garbage.headers["access-control-allow-origin"] == origin
        await until(lambda: not server.state.connections)
        held = await server.connect()
        await held.send(post(ORIGIN, "Content-Length: 2"))
        await until(
            lambda: any(getattr(one, "_in_body", False) for one in server.state.connections)
        )
        late = await (await server.connect()).reply()
        await held.close()
    assert late.status == 503
    # Before its first byte nobody knows which page asks.
    assert late.headers.get("access-control-allow-origin") == ("*" if origin == "*" else None)


async def test_headers_are_there_once_although_a_layer_stays() -> None:
    """As behind a layer of ``--middleware`` that can't be looked through."""
    app = build_app(parse([*OF_PAGES]).serve, ("generate",), None)
    async with (
        served(app, *OF_PAGES) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as http,
    ):
        reply = await http.get("/version", headers={"Origin": PAGE})
    assert reply.status_code == 200
    for name in ("access-control-allow-origin", "x-request-id"):
        assert len(reply.headers.get_list(name)) == 1


async def test_answers_of_vllms_app_are_as_before() -> None:
    """But for the headers that pages may read."""
    ours, theirs = vllms_app(*OF_PAGES), build_app(parse([*OF_PAGES]).serve, ("generate",), None)
    heads = []
    for app in (ours, theirs):
        async with served(app, *OF_PAGES) as server:
            reply = await server.ask(
                post(ORIGIN, "X-Request-Id: mine", method="GET", path="/version")
            )
            assert json.loads(reply.body)
            heads.append(reply.headers)
    assert heads[0].keys() == heads[1].keys()
    assert heads[0]["access-control-allow-origin"] == heads[1]["access-control-allow-origin"]

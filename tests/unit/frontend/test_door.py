"""Requests pass the door's steps in order, and what they took on the way is given back."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from starlette.responses import PlainTextResponse

from common.errors import NoWorkerError
from frontend.args import parse
from frontend.asgi import ENTRIES, App, Arrival, Door, Message, Receive, Scope, Send, Step
from frontend.door import make_door
from frontend.http.server.readiness_gate import ReadinessGate
from frontend.request_context import current_context

HTTP: dict[str, Any] = {"type": "http", "method": "POST", "path": "/x", "headers": []}
SOCKET: dict[str, Any] = {"type": "websocket", "path": "/v1/realtime", "headers": []}


async def nothing() -> Message:
    raise AssertionError("it is read")


async def pass_door(door: App, scope: dict[str, Any]) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await door({**scope}, nothing, send)
    return sent


def step(name: str, said: list[str], answer: App | None = None) -> Step:
    @contextmanager
    def holding() -> Iterator[None]:
        said.append(f"take {name}")
        try:
            yield
        finally:
            said.append(f"give {name}")

    async def take(arrival: Arrival) -> App | None:
        arrival.held.enter_context(holding())
        return answer

    return take


async def test_a_crowd_leaves_turns_of_the_loop_to_others() -> None:
    begun = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += 1

    door = Door(app, [])
    crowd = asyncio.gather(*(pass_door(door, HTTP) for _ in range(100 * ENTRIES)))
    turns = 0
    while not crowd.done():
        before = begun
        await asyncio.sleep(0)
        turns += 1
        assert begun - before <= ENTRIES
    assert begun == 100 * ENTRIES and turns < 300


async def test_steps_come_in_order_and_are_undone_in_the_other() -> None:
    said: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        said.append("app")

    await pass_door(Door(app, [step("a", said), step("b", said)]), HTTP)
    assert said == ["take a", "take b", "app", "give b", "give a"]


async def test_an_answer_ends_the_way() -> None:
    said: list[str] = []
    refusal = PlainTextResponse("no", 403)
    door = Door(PlainTextResponse("app"), [step("a", said, refusal), step("b", said)])
    assert (await pass_door(door, HTTP))[0]["status"] == 403
    assert said == ["take a", "give a"]


async def test_what_was_taken_is_given_back_when_the_app_fails() -> None:
    said: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await pass_door(Door(app, [step("a", said)]), HTTP)
    assert said == ["take a", "give a"]


class Content:
    """In the place of bytes, of which nobody can ask whether they are there."""


async def test_a_body_that_was_read_is_the_apps_alone() -> None:
    async def read(arrival: Arrival) -> None:
        arrival.body = cast(bytes, Content())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert message["more_body"] is False
        body = weakref.ref(message["body"])
        assert isinstance(body(), Content)
        del message
        gc.collect()
        assert body() is None

    await pass_door(Door(app, [read]), HTTP)


async def test_each_request_has_a_context_of_its_own() -> None:
    contexts = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        contexts.append(current_context())
        assert current_context().find(str) is None
        current_context().put("mine")
        assert current_context().find(str) == "mine"

    door = Door(app, [])
    for _ in range(2):  # in one task, as of a client's next request
        await pass_door(door, HTTP)
    assert contexts[0] is not contexts[1]


def nobody() -> None:
    raise NoWorkerError("no worker is available")


async def test_a_websocket_is_let_in_with_a_key_and_when_there_is_an_app() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})

    gate = ReadinessGate(nobody)
    door = make_door(parse(["--api-key=sesam"]), gate)
    with_key = SOCKET | {"headers": [(b"authorization", b"Bearer sesam")]}
    assert await pass_door(door, with_key) == []
    gate.let_in(app)
    assert await pass_door(door, with_key) == [{"type": "websocket.accept"}]
    assert await pass_door(door, SOCKET) == [{"type": "websocket.close", "code": 1008}]

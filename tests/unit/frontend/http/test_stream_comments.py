"""Comments in idle streams, by a clock that the test moves."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT as COMMENT

from frontend.http.streaming import token_streams
from frontend.http.streaming.token_streams import with_comments
from frontend.request import DirectEvents
from frontend.request import direct_events as direct
from tests.waiting import until

INTERVAL = 0.002


class Clock:
    """Each look at it takes a part of the interval."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        self.now += INTERVAL / 3
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (token_streams, direct):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def events() -> DirectEvents:
    """Of the HTTP request that the test works on: one that has been understood."""
    made = DirectEvents(lambda piece: True)
    made.allow()
    made.claim()
    made.gives("b", 1)
    made.saw(b'data: {"choices":[{"index":0,"delta":{"content":"b"}}]}\n\n')
    return made


async def collect(stream: AsyncGenerator[str], said: list[str]) -> None:
    async with aclosing(stream):
        async for event in stream:
            said.append(event)


async def test_comments_come_only_while_nothing_goes_to_the_client(
    clock: Clock, events: DirectEvents
) -> None:
    more: asyncio.Queue[str] = asyncio.Queue()

    async def stream() -> AsyncGenerator[str]:
        while (event := await more.get()) != "end":
            yield event

    said: list[str] = []
    collecting = asyncio.create_task(collect(with_comments(stream(), INTERVAL, events), said))
    await until(lambda: said.count(COMMENT) > 2)
    looked, before = clock.looks, len(said)

    def is_busy() -> bool:
        assert events.send("x", 2)  # past the stream
        return clock.looks > looked + 100

    await until(is_busy)
    busy = len(said)
    await until(lambda: len(said) > busy)  # idle again
    more.put_nowait("event")
    await until(lambda: "event" in said)
    more.put_nowait("end")
    await collecting
    assert set(said) == {COMMENT, "event"}
    assert events.sent_at > 1000.0 and before <= busy


async def test_no_comment_while_events_go_past(
    monkeypatch: pytest.MonkeyPatch, events: DirectEvents
) -> None:
    """Whenever somebody looks, one has just gone."""
    looks = 0

    def sent_at(_: DirectEvents) -> float:
        nonlocal looks
        looks += 1
        return float(looks)

    monkeypatch.setattr(DirectEvents, "sent_at", property(sent_at), raising=False)
    monkeypatch.setattr(token_streams, "time", SimpleNamespace(monotonic=lambda: float(looks)))
    ends = asyncio.Event()

    async def stream() -> AsyncGenerator[str]:
        await ends.wait()
        yield "last"

    said: list[str] = []
    collecting = asyncio.create_task(collect(with_comments(stream(), INTERVAL, events), said))
    await until(lambda: looks > 20)
    ends.set()
    await collecting
    assert said == ["last"]


async def test_who_leaves_ends_the_stream(events: DirectEvents) -> None:
    ended = asyncio.Event()

    async def stream() -> AsyncGenerator[str]:
        try:
            yield "first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with aclosing(with_comments(stream(), INTERVAL, events)) as commented:
        while await anext(commented) != "first":
            """Its turn took longer than an interval, on a machine that is taken."""
        assert await anext(commented) == COMMENT
    assert ended.is_set()


async def test_what_the_stream_raises_is_raised(events: DirectEvents) -> None:
    async def stream() -> AsyncGenerator[str]:
        yield "first"
        raise ValueError("broken")

    said: list[str] = []
    with pytest.raises(ValueError, match="broken"):
        await collect(with_comments(stream(), 60.0, events), said)
    assert said == ["first"]


@pytest.mark.parametrize("interval", [0.0, -1.0, float("inf")])
async def test_without_an_interval_a_stream_is_as_it_was(
    interval: float, events: DirectEvents
) -> None:
    async def stream() -> AsyncGenerator[str]:
        yield "only"

    made = stream()
    assert with_comments(made, interval, events) is made
    await made.aclose()

"""A link to a worker, without one."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import zmq.asyncio
from vllm.outputs import CompletionOutput

from common.identity import Incarnation, RequestId
from common.request_plane.protocol import Output, Outputs, ToFrontend
from frontend.workers import link as link_module
from frontend.workers.dispatch import Dispatch
from frontend.workers.link import BURST_S, MAX_PAUSE_S, SHARE, Pace, WorkerLink
from tests.fakes.cards import make_card
from tests.fakes.messages import frames_of


async def test_a_close_that_is_cancelled_leaves_no_socket() -> None:
    context = zmq.asyncio.Context()
    try:
        link = WorkerLink(make_card(), context, Incarnation("f"), lambda _: None)
        link._tasks = [asyncio.create_task(asyncio.sleep(60))]
        closing = asyncio.create_task(link.close())
        while not link._tasks[0].cancelling():  # noqa: ASYNC110 # one step of the loop at a time
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert closing.cancelled()
        assert link._socket.closed
        assert link._socket.monitor.closed
    finally:
        context.destroy(linger=0)


class Waiting:
    """A socket with messages in it: of one request, and behind them one of another."""

    closed = False

    def __init__(self, outputs: int) -> None:
        names = [*["hog"] * outputs, "other"]
        self._messages = [
            [memoryview(frame) for frame in frames_of(Outputs([output(name)]), ToFrontend)]
            for name in names
        ]

    @property
    def readable(self) -> bool:
        return bool(self._messages)

    async def receive(self) -> list[Any]:
        if not self._messages:
            await asyncio.Event().wait()
        return [SimpleNamespace(buffer=frame) for frame in self._messages.pop(0)]


def output(name: str) -> Output:
    return Output(RequestId(name), [CompletionOutput(0, "a", [1], None, None)], finished=False)


@pytest.mark.parametrize("piled", [500, 20])
async def test_answers_are_read_ahead_of_requests_whose_turns_are_long(
    monkeypatch: pytest.MonkeyPatch, piled: int
) -> None:
    """Behind 100 messages, another request waited for 100 turns."""
    monkeypatch.setattr(link_module, "READ_S", 1e9)
    monkeypatch.setattr(link_module, "PILED_ANSWERS", piled)
    context = zmq.asyncio.Context()
    try:
        link = WorkerLink(make_card(), context, Incarnation("f"), lambda _: None)
        link._close_socket()
        vars(link)["_socket"] = Waiting(100)
        hog, other = (Dispatch(()) for _ in range(2))
        link._dispatches |= {RequestId("hog"): hog, RequestId("other"): other}
        reading = asyncio.create_task(link._read())
        turns = 0
        while not other.unread:
            await asyncio.sleep(0)
            turns += 1
        assert hog.unread == 100
        assert turns < 5 if piled > 100 else turns > 75, "the worker merges what is not read"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        context.destroy(linger=0)


async def test_answers_are_read_for_as_long_as_requests_had_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside streams whose turns took 30 ms, 3 ms of reading left answers in the socket for 2 s."""
    monkeypatch.setattr(link_module, "READ_S", 0.0)
    context = zmq.asyncio.Context()
    try:
        link = WorkerLink(make_card(), context, Incarnation("f"), lambda _: None)
        link._close_socket()
        vars(link)["_socket"] = Waiting(100)
        hog, other = (Dispatch(()) for _ in range(2))
        link._dispatches |= {RequestId("hog"): hog, RequestId("other"): other}
        reading = asyncio.create_task(link._read())
        turns = 0
        while not other.unread:
            time.sleep(0.02)  # noqa: ASYNC251  # a long turn
            await asyncio.sleep(0)
            turns += 1
        assert turns < 30
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        context.destroy(linger=0)


def test_messages_that_answer_nothing_take_a_share_of_the_event_loop() -> None:
    """Ten thousand load reports a second kept others waiting for a second."""
    pace, now, spent = Pace(), 100.0, 0.0
    for _ in range(1000):
        spent += 0.001
        pause_s = pace.pause_s(now, now + 0.001)
        now += 0.001 + pause_s
    assert spent < SHARE * (now - 100.0) + 2 * BURST_S


def test_usual_load_reports_are_not_delayed() -> None:
    pace = Pace()
    assert not any(pace.pause_s(at, at + 0.001) for at in range(1000))


def test_one_that_takes_long_is_followed_by_a_pause() -> None:
    assert Pace().pause_s(100.0, 100.1) == pytest.approx(0.1 / SHARE)
    assert Pace().pause_s(100.0, 200.0) == MAX_PAUSE_S, "this process was stopped"

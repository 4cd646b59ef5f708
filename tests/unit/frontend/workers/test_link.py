"""A link to a worker, without one."""

import asyncio

import pytest
import zmq.asyncio

from common.identity import Incarnation
from frontend.workers.link import BURST_S, MAX_PAUSE_S, SHARE, Pace, WorkerLink
from tests.fakes.cards import make_card


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

"""A link to a worker, without one."""

import asyncio

import zmq.asyncio

from common.identity import Incarnation
from frontend.workers.link import WorkerLink
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

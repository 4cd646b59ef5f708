"""What waits to be read of one request."""

import asyncio

from common.identity import RequestId
from common.request_plane.protocol import Output
from frontend.workers.dispatch import Dispatch
from tests.waiting import until


async def test_others_have_turns_while_many_answers_are_read() -> None:
    """A client reads nothing, and then all at once: nothing that becomes of its answers waits."""
    dispatch = Dispatch(())
    turns = most = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    for _ in range(1000):
        dispatch.put(Output(RequestId("r"), [], finished=False))
    await until(lambda: turns > 0)
    for _ in range(1000):
        before = turns
        await dispatch.next()
        most = max(most, turns - before)
        assert turns > before
    task.cancel()
    assert dispatch.unread == 0 and most < 10

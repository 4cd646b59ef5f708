"""Late requests and stalled workers."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from common.errors import DeadlineExceededError, OutputTimeoutError
from common.identity import RequestId, WorkerId
from common.request_plane.protocol import Ack
from frontend.request.deadlines import Deadlines
from frontend.request.settings import FaultSettings
from frontend.workers.dispatch import Answer

ACK = Ack(RequestId("r"), [])
NEVER = 1000.0


class Script:
    """Says an ack after each pause, and notes whether it was closed."""

    def __init__(self, *pauses: float) -> None:
        self.pauses = pauses
        self.closed = False

    async def answers(self) -> AsyncGenerator[Answer]:
        try:
            for pause in self.pauses:
                await asyncio.sleep(pause)
                yield ACK
        finally:
            self.closed = True


async def watched(settings: FaultSettings, script: Script) -> int:
    deadlines = Deadlines(settings)
    return len([each async for each in deadlines.watch(WorkerId("w0"), script.answers())])


async def test_without_deadlines_everything_is_in_time() -> None:
    script = Script(0, 0.01, 0)
    assert await watched(FaultSettings(), script) == 3
    assert script.closed
    assert Deadlines(FaultSettings()).left_s() is None


@pytest.mark.parametrize("stall", [0.0, NEVER])
async def test_a_late_request_ends_and_the_worker_is_told(stall: float) -> None:
    script = Script(0, 0, NEVER)
    with pytest.raises(DeadlineExceededError, match=r"within 0\.05 s") as caught:
        await watched(FaultSettings(request_timeout_s=0.05, output_timeout_s=stall), script)
    assert script.closed
    assert caught.value.status == 504 and not caught.value.retryable


@pytest.mark.parametrize("total", [0.0, NEVER])
async def test_a_stalled_worker_loses_the_request(total: float) -> None:
    script = Script(0, 0, NEVER)
    with pytest.raises(OutputTimeoutError, match=r"w0 said nothing .* 0\.05 s") as caught:
        await watched(FaultSettings(request_timeout_s=total, output_timeout_s=0.05), script)
    assert script.closed
    assert caught.value.status == 504 and caught.value.retryable


async def test_a_request_that_is_late_already_still_starts_its_worker() -> None:
    """So that what was leased to the worker comes back by the usual way."""
    deadlines = Deadlines(FaultSettings(request_timeout_s=0.001))
    await asyncio.sleep(0.01)
    assert deadlines.left_s() == 0
    script = Script(NEVER)
    with pytest.raises(DeadlineExceededError):
        await anext(deadlines.watch(WorkerId("w0"), script.answers()))
    assert script.closed

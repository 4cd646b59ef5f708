"""Limit the calls of one request that are at workers at a time.

vLLM's server makes one for each input, all at once, thousands if a client likes. Admission puts a
:class:`Batch` into the request's context; calls without one are not limited.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, field

from frontend.request.deadlines import Deadlines
from frontend.request_context import current_context


@dataclass
class Batch:
    """Limits and usage of one request.

    Attributes:
        places: slots, of which a call takes one of each in this order: of the request's own, so
            that no request takes all, and of several requests'.
        keep: called with the bytes of each pooled answer, which is held until the request's last
            one; raises OverloadedError if there is no room.
        logprobs: log probabilities that its calls asked for.
        repeated: tokens of prompts that its calls repeat for several choices.
        turns: limits the calls of all requests that begin before the event loop has a turn.
    """

    places: Sequence[asyncio.Semaphore]
    keep: Callable[[int], None] | None = None
    logprobs: int = 0
    repeated: int = 0
    turns: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)


@asynccontextmanager
async def place(deadlines: Deadlines) -> AsyncIterator[None]:
    """Wait for a slot and hold it. Raises DeadlineExceededError if there is none in time."""
    if (batch := current_context().find(Batch)) is None:
        yield
        return
    async with await _places(batch, deadlines):
        async with batch.turns:
            await asyncio.sleep(0)
        yield


async def _places(batch: Batch, deadlines: Deadlines) -> AsyncExitStack:
    async with AsyncExitStack() as taken:
        try:
            async with asyncio.timeout(deadlines.left_s()):
                for places in batch.places:
                    await taken.enter_async_context(places)
        except TimeoutError as error:
            raise deadlines.late() from error
        return taken.pop_all()


def keep(nbytes: int) -> None:
    """Count a pooled answer, held until its request's last one. Raises OverloadedError."""
    batch = current_context().find(Batch)
    if batch is not None and batch.keep is not None:
        batch.keep(nbytes)

"""The calls of one request: how many of them may be at workers at a time.

vLLM's server makes one for each input, all at once, thousands if a client likes. Whoever lets such
a request in says here what it may take; a call that belongs to none takes what it wants.
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
    """What one request may take, and has taken.

    Attributes:
        places: a call has one of each: of its own, so that no request takes all that there are, and
            of those of several requests, in this order.
        keep: called with the bytes of each pooled answer, which are held until the last one is
            there; raises OverloadedError if there is no room.
        logprobs: log probabilities that its calls asked for.
        turns: so many calls, of all requests, begin before others on the event loop have a turn.
    """

    places: Sequence[asyncio.Semaphore]
    keep: Callable[[int], None] | None = None
    logprobs: int = 0
    turns: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)


@asynccontextmanager
async def place(deadlines: Deadlines) -> AsyncIterator[None]:
    """Wait for a place, and hold it.

    Raises:
        DeadlineExceededError: there is none in time.
    """
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
    """An answer is held until the last one of its request is there.

    Raises:
        OverloadedError: there is no room for it.
    """
    batch = current_context().find(Batch)
    if batch is not None and batch.keep is not None:
        batch.keep(nbytes)

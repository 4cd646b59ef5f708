"""Make whole answers with many log probabilities aside from the event loop.

vLLM makes a pydantic model of each, 15 µs of the loop: those of 12,000 tokens with 20 candidates
stopped all other requests for four seconds.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from vllm.outputs import RequestOutput

MANY: Final = 512
"""Tokens with log probabilities of their own, from which an answer goes aside."""


async def made_aside(
    make: Callable[[AsyncIterator[Any]], Awaitable[Any]], outputs: AsyncIterator[Any]
) -> Any:
    """Wait for the last output here, and make a large answer in a thread.

    Args:
        make: vLLM's method, which makes an answer of outputs.
    """
    last: RequestOutput | None = None
    try:
        async for output in outputs:
            last = output
    except asyncio.CancelledError as error:
        return await make(_again(last, error))
    if last is None or not _is_large(last):
        return await make(_again(last))
    return await asyncio.to_thread(asyncio.run, _made(make, last))


async def _made(make: Callable[[AsyncIterator[Any]], Awaitable[Any]], last: RequestOutput) -> Any:
    return await make(_again(last))


async def _again(
    last: RequestOutput | None, error: BaseException | None = None
) -> AsyncIterator[RequestOutput]:
    if last is not None:
        yield last
    if error is not None:
        raise error


def _is_large(answer: RequestOutput) -> bool:
    return sum(len(one.logprobs) for one in answer.outputs if one.logprobs) > MANY

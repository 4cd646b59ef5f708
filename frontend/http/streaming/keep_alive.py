"""Comments in idle streams (``--sse-keep-alive-interval``), where vLLM does not see all of them.

It would take a stream for idle whose events go past it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Final

from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.completion import api_router as completion
from vllm.entrypoints.serve.utils import sse_keep_alive

from frontend.request import DirectEvents, current_events

_vllms: Final = sse_keep_alive.with_sse_keep_alive


def install() -> None:
    """Have vLLM's routers make streams with our comments."""
    for module in (chat, completion):
        vars(module)[_vllms.__name__] = with_comments


def with_comments(stream: AsyncGenerator[str], interval: float) -> AsyncGenerator[str]:
    """The events of a stream, and a comment whenever its client has got nothing for an interval.

    Args:
        interval: seconds; without comments unless it is more than 0 and finite.
    """
    events = current_events.get()
    if events is None or not 0 < interval < float("inf"):
        return _vllms(stream, interval)
    return _with_comments(stream, interval, events)


async def _with_comments(
    stream: AsyncGenerator[str], interval: float, events: DirectEvents
) -> AsyncGenerator[str]:
    said_at = time.monotonic()
    coming = asyncio.ensure_future(anext(stream))
    try:
        while True:
            left = max(said_at, events.sent_at) + interval - time.monotonic()
            if left > 0 and not coming.done():
                await asyncio.wait({coming}, timeout=left)
                continue  # an event may have gone past meanwhile
            if coming.done():
                try:
                    event = coming.result()
                except StopAsyncIteration:
                    return
                yield event
                coming = asyncio.ensure_future(anext(stream))
            else:
                yield sse_keep_alive.SSE_KEEP_ALIVE_COMMENT
            said_at = time.monotonic()
    finally:
        coming.cancel()
        # Whatever it was, the reader of this stream is gone, or was told.
        await asyncio.gather(coming, return_exceptions=True)
        await stream.aclose()

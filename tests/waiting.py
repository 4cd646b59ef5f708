"""Waiting for what nobody announces."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop run until a condition holds; for three minutes, which cost nothing if it
    does.
    """
    async with asyncio.timeout(180):
        while not condition():  # noqa: ASYNC110 # others' tasks, threads and processes set no event
            await asyncio.sleep(0.01)

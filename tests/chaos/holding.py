"""Requests that do not end: leases, slots and streams that stay, as a leak of them would."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.clients import Prompt, ask, fresh_prompt
from tests.chaos.fleet import Fleet

ENDLESS_TOKENS = 3000


@asynccontextmanager
async def streaming(fleet: Fleet, prompt: Prompt) -> AsyncIterator[None]:
    """Hold an answer on which an engine is known to work; then the user leaves."""
    endless = Prompt(prompt.number, prompt.body | {"max_tokens": ENDLESS_TOKENS, "stream": True})
    asking = asyncio.create_task(ask(fleet.http, fleet.survivor, endless))
    try:
        while not await fleet.works():
            assert not asking.done()
            await asyncio.sleep(0.02)
        yield
    finally:
        asking.cancel()
        await asyncio.wait([asking])


@asynccontextmanager
async def held(fleet: Fleet, prompt: Prompt) -> AsyncIterator[None]:
    """Hold an answer that is streamed, and a picture that engines have not taken."""
    engines = [worker.engine_pid for worker in fleet.workers]
    async with streaming(fleet, prompt):
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(ask(fleet.http, fleet.survivor, fresh_prompt("held")))
        try:
            while not (await fleet.survivor.metrics())["mmrouter_arena_leases"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            yield
        finally:
            for pid in engines:
                os.kill(pid, signal.SIGCONT)
            waiting.cancel()

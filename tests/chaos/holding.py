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
async def held(fleet: Fleet, prompt: Prompt) -> AsyncIterator[None]:
    """Hold an answer that is streamed, and a picture that engines have not taken."""
    endless = Prompt(prompt.number, prompt.body | {"max_tokens": ENDLESS_TOKENS, "stream": True})
    engines = [worker.engine_pid for worker in fleet.workers]
    streaming = asyncio.create_task(ask(fleet.http, fleet.survivor, endless))
    waiting = None
    try:
        while not any(view["running"] for view in await fleet.views(fleet.survivor)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.create_task(ask(fleet.http, fleet.survivor, fresh_prompt("held")))
        while not (await fleet.survivor.metrics())["mmrouter_arena_leases"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        yield
    finally:
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
        for task in (streaming, waiting):
            if task is not None:
                task.cancel()

"""The order in which batches get the processor."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from frontend.processing.backends import _Lane
from frontend.request_context import begin


async def test_a_client_with_many_media_delays_another_by_those_at_the_thread() -> None:
    ended: list[str] = []
    go_on = threading.Event()

    def work(client: str, _: Any) -> list[Any]:
        go_on.wait(60)
        ended.append(client)
        return []

    with ThreadPoolExecutor(1) as thread:
        lane = _Lane(thread, lambda: None)

        async def run_as(client: str) -> None:
            begin().peer = client
            await lane.run(partial(work, client))

        async with asyncio.TaskGroup() as tasks:
            for client in [*["many"] * 8, "few"]:
                tasks.create_task(run_as(client))
            await asyncio.sleep(0)  # each has asked for its turn
            go_on.set()
    assert ended.index("few") <= 2
    assert len(ended) == 9

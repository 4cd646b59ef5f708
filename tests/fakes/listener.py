"""A subscriber with the indexes that it feeds."""

import asyncio
import time
from collections.abc import Callable

from common.identity import Incarnation, Target, WorkerId
from frontend.router.events.subscriber import ZmqFeeds
from frontend.router.index.indexes import EXACT, BlockIndexes
from frontend.router.inputs import EventSource, RoutableWorker
from tests.fakes.kv_events import BLOCK_SIZE, blocks

W = WorkerId("w")


class Listener:
    """A subscriber with the indexes it feeds."""

    def __init__(self, feeds: ZmqFeeds, *sources: EventSource) -> None:
        worker = RoutableWorker(
            worker_id=W,
            incarnation=Incarnation("1"),
            ranks=tuple(source.rank for source in sources),
            block_size=BLOCK_SIZE,
            hash_algorithm="sha256_cbor",
            none_hash=bytes(32),
            event_sources=sources,
        )
        indexes = BlockIndexes.empty()
        for target in worker.targets:
            indexes.slots.open(target)
        self.index = indexes.known
        self.subscriber = feeds.feed(worker, indexes)

    def held(self, *numbers: int, rank: int = 0) -> int:
        return self.index.match(blocks(*numbers)).get(Target(W, rank), 0)

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Let time pass until the condition is true."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.subscriber.tick(time.monotonic())
                await asyncio.sleep(0.02)

    def exact(self, rank: int = 0) -> bool:
        return self.subscriber.state(rank) == EXACT

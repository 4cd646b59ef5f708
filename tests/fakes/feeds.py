"""Feeds that say what a test tells them to, without sockets."""

from frontend.router.event_wire import Change, EventBatch
from frontend.router.events.progress import StreamStatistics
from frontend.router.index.indexes import EXACT, BlockIndexes, IndexState, TargetBlocks
from frontend.router.inputs import RoutableWorker


class ScriptedFeed:
    """A feed of a worker, exact unless told otherwise."""

    def __init__(self, worker: RoutableWorker, indexes: BlockIndexes) -> None:
        self.blocks = {
            target.rank: TargetBlocks(target, worker.block_size, 0, indexes)
            for target in worker.targets
        }
        self.known = EXACT
        self.served_since: list[float] = []
        self.closed = False

    def apply(self, *changes: Change, rank: int = 0) -> None:
        """The worker's cache changed."""
        self.blocks[rank].apply(EventBatch(0.0, list(changes)))

    def start(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

    def state(self, rank: int) -> IndexState:
        return self.known

    def served(self, rank: int, routed_at: float) -> None:
        self.served_since.append(routed_at)

    def emptied(self, at: float) -> None:
        if at:
            for blocks in self.blocks.values():
                blocks.clear()

    def tick(self, now: float) -> None:
        pass

    def statistics(self) -> dict[int, StreamStatistics]:
        return {}


class ScriptedFeeds:
    """Makes scripted feeds and remembers them by worker."""

    def __init__(self) -> None:
        self.by_worker: dict[str, ScriptedFeed] = {}

    def feed(self, worker: RoutableWorker, indexes: BlockIndexes) -> ScriptedFeed:
        made = self.by_worker[worker.worker_id] = ScriptedFeed(worker, indexes)
        return made

    def close(self) -> None:
        pass

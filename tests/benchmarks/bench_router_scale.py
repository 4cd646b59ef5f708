"""Routing a fleet of 10, 100 and 1,000 simulated workers, in three modes.

``python -m tests.benchmarks.bench_router_scale --output DIR`` runs conversations that
share system prompts and images through the real router, over workers that exist only as
a cache, a queue and a clock. It prints a table, writes ``router_scale.png`` and ends with
one JSON line. Times are those of the simulated clock, save for decisions.
"""

import argparse
import asyncio
import heapq
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from common.identity import (
    BlockHash,
    Incarnation,
    MmHash,
    MmIdentifier,
    RequestId,
    Target,
    WorkerId,
)
from frontend.router.event_wire import EventBatch, Need, Removed, Stored
from frontend.router.events.progress import StreamStatistics
from frontend.router.hashing.block_hasher import BlockHasher, MediaSpan
from frontend.router.index.indexes import EXACT, BlockIndexes, IndexState, TargetBlocks
from frontend.router.inputs import EventSource, MediaNeed, RoutableWorker, RoutingRequest
from frontend.router.modes import BuiltInMode
from frontend.router.router import Router
from frontend.router.settings import RouterSettings
from tests.benchmarks.telling import telling
from tests.fakes.none_hash import none_hash_for
from tests.fakes.reports import rank_report

MODES = (BuiltInMode.KV, BuiltInMode.ROUND_ROBIN)
ALGORITHM = "sha256_cbor"
NONE_HASH = none_hash_for(ALGORITHM)
BLOCK_SIZE = 16
VOCABULARY = 151_000

# A worker, about one mid-range GPU with a 7 B model.
CACHE_BLOCKS = 4096
PREFILL_TOKENS_PER_S = 8_000.0
DECODE_S_PER_TOKEN = 0.02
SLOTS = 32
SHIP_BYTES_PER_S = 4e9
ENCODER_ITEMS = 64
"""Images whose encoding a worker keeps."""

# Conversations.
SYSTEM_TOKENS = 600
IMAGE_TOKENS = 800
IMAGE_BYTES = 6 << 20
USER_TOKENS = 150
ANSWER_TOKENS = 100
TURNS = 5
THINK_S = 4.0
CONVERSATIONS_PER_WORKER_S = 1.2


@dataclass(slots=True)
class Conversation:
    """Turns of one user: each prompt is the one before, its answer, and more."""

    tokens: list[int]
    image: MediaNeed | None
    turns_left: int


@dataclass(slots=True)
class Running:
    """A request on its way through a worker."""

    request: RoutingRequest
    hashes: list[BlockHash]
    conversation: Conversation
    arrived: float
    cached_tokens: int = 0


class Worker:
    """A cache, a queue and a clock; and the feed that tells the router of the cache."""

    def __init__(self, worker: RoutableWorker, indexes: BlockIndexes) -> None:
        target = Target(worker.worker_id, 0)
        self._blocks = TargetBlocks(target, BLOCK_SIZE, CACHE_BLOCKS, indexes)
        self._cache: OrderedDict[BlockHash, None] = OrderedDict()
        self._images: OrderedDict[MmHash, None] = OrderedDict()
        self.name = worker.worker_id
        self.free_at = 0.0
        self.active = 0
        self.queue: list[Running] = []
        self.computed = 0

    # As a feed

    def start(self) -> None: ...

    async def close(self) -> None: ...

    def state(self, rank: int) -> IndexState:
        return EXACT

    def served(self, rank: int, routed_at: float) -> None: ...

    def emptied(self, at: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def statistics(self) -> dict[int, StreamStatistics]:
        return {}

    # As a worker

    def prefill(self, running: Running, now: float) -> float:
        """Compute a prompt, after those before it; when its first token is out."""
        usable = (len(running.request.token_ids) - 1) // BLOCK_SIZE
        hit = 0
        while hit < usable and running.hashes[hit] in self._cache:
            hit += 1
        running.cached_tokens = hit * BLOCK_SIZE
        work = len(running.request.token_ids) - running.cached_tokens
        seconds = 0.0
        for need in running.request.media:
            if need.mm_hash not in self._images:
                seconds += need.nbytes / SHIP_BYTES_PER_S
                if need.span.end > running.cached_tokens:
                    work += need.num_tokens
                self._images[need.mm_hash] = None
                if len(self._images) > ENCODER_ITEMS:
                    self._images.popitem(last=False)
            self._images.move_to_end(need.mm_hash)
        self.computed += work
        self.free_at = max(self.free_at, now) + seconds + work / PREFILL_TOKENS_PER_S
        return self.free_at

    def store(self, hashes: list[BlockHash]) -> None:
        """Keep a prompt's blocks; the least recently used make way, ends of prompts first."""
        fresh = [one for one in hashes if one not in self._cache]
        for one in reversed(hashes):
            self._cache[one] = None
            self._cache.move_to_end(one)
        gone = [
            self._cache.popitem(last=False)[0]
            for _ in range(max(0, len(self._cache) - CACHE_BLOCKS))
        ]
        changes: list[Stored | Removed] = []
        if fresh:
            first = hashes.index(fresh[0])
            parent = hashes[first - 1] if first else None
            # Blocks missing in the middle of a prompt are rare, and then not chained.
            chained = hashes[first : first + len(fresh)] == fresh
            changes.append(
                Stored(
                    fresh, BLOCK_SIZE, 0, Need.EVERY, 0, "full_attention", False, parent, chained
                )
            )
        if gone:
            changes.append(Removed(gone, 0, False))
        self._blocks.apply(EventBatch(0.0, list(changes)))


class Workers:
    """Makes the simulated workers when the router asks for their feeds."""

    def __init__(self) -> None:
        self.by_id: dict[WorkerId, Worker] = {}
        self.indexes: BlockIndexes | None = None

    def feed(self, worker: RoutableWorker, indexes: BlockIndexes) -> Worker:
        self.indexes = indexes
        made = self.by_id[worker.worker_id] = Worker(worker, indexes)
        return made

    def close(self) -> None: ...


@dataclass
class Figures:
    """What one run showed."""

    decision_us: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0


class Simulation:
    """One fleet in one mode.

    Args:
        size: workers.
        mode: how the router chooses.
        seconds: of simulated arrivals.
    """

    def __init__(self, size: int, mode: BuiltInMode, seconds: float) -> None:
        self._size = size
        self._seconds = seconds
        self._random = random.Random(size)
        self.now = 0.0
        self.workers = Workers()
        self.router = Router(
            RouterSettings(mode=mode), clock=lambda: self.now, feeds=self.workers, seed=1
        )
        self._hasher = BlockHasher(BLOCK_SIZE, ALGORITHM, NONE_HASH)
        self._systems = [self._tokens(SYSTEM_TOKENS) for _ in range(max(4, size // 5))]
        self._images = max(20, size * 4)
        self._numbers = count()
        self._events: list[tuple[float, int, str, Any]] = []
        self.figures = Figures()

    async def run(self) -> None:
        """Let conversations arrive and all of them end."""
        for number in range(self._size):
            await self.router.roster.add(
                RoutableWorker(
                    worker_id=WorkerId(str(number)),
                    incarnation=Incarnation("1"),
                    ranks=(0,),
                    block_size=BLOCK_SIZE,
                    hash_algorithm=ALGORITHM,
                    none_hash=NONE_HASH,
                    event_sources=(EventSource(0, "unused", "unused"),),
                    kv_tokens=CACHE_BLOCKS * BLOCK_SIZE,
                    max_num_seqs=SLOTS,
                )
            )
        rate = CONVERSATIONS_PER_WORKER_S * self._size
        arrival = 0.0
        while (arrival := arrival + self._random.expovariate(rate)) < self._seconds:
            self._at(arrival, "turn", self._conversation())
        while self._events:
            self.now, _, kind, subject = heapq.heappop(self._events)
            if kind == "turn":
                self._turn(subject)
            elif kind == "first token":
                self._first_token(*subject)
            else:
                self._end(*subject)

    def _at(self, when: float, kind: str, subject: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), kind, subject))

    def _tokens(self, length: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(length)]

    def _zipf(self, choices: int) -> int:
        """A number below ``choices``, small ones far more often."""
        return int(choices ** self._random.random()) - 1

    def _conversation(self) -> Conversation:
        tokens = list(self._systems[self._zipf(len(self._systems))])
        image = None
        if self._random.random() < 0.5:
            name = f"image-{self._zipf(self._images)}"
            span = MediaSpan(MmIdentifier(name), len(tokens), IMAGE_TOKENS)
            image = MediaNeed(MmHash(name), span, IMAGE_TOKENS, IMAGE_BYTES)
            tokens += [7] * IMAGE_TOKENS
        return Conversation(tokens, image, self._random.randint(1, TURNS))

    def _turn(self, conversation: Conversation) -> None:
        conversation.tokens += self._tokens(USER_TOKENS)
        conversation.turns_left -= 1
        request = RoutingRequest(
            RequestId(str(next(self._numbers))),
            tuple(conversation.tokens),
            [conversation.image] if conversation.image else [],
        )
        started = time.perf_counter()
        decision = self.router.route(request)
        self.figures.decision_us.append((time.perf_counter() - started) * 1e6)
        self.figures.predicted_tokens += decision.predicted_cached_tokens
        hashes = self._hasher.hash(
            request.token_ids, request.block_mm_infos(BLOCK_SIZE) if request.media else ()
        )
        running = Running(request, hashes, conversation, self.now)
        worker = self.workers.by_id[decision.worker_id]
        if worker.active < SLOTS:
            self._begin(worker, running)
        else:
            worker.queue.append(running)
        self._report(worker)

    def _begin(self, worker: Worker, running: Running) -> None:
        worker.active += 1
        self._at(worker.prefill(running, self.now), "first token", (worker, running))

    def _first_token(self, worker: Worker, running: Running) -> None:
        figures, request = self.figures, running.request
        figures.first_token_s.append(self.now - running.arrived)
        figures.prompt_tokens += len(request.token_ids)
        figures.cached_tokens += running.cached_tokens
        worker.store(running.hashes)
        self.router.in_flight.first_token(request.request_id)
        self.router.media.acked(worker.name, [need.mm_hash for need in request.media])
        self._at(self.now + ANSWER_TOKENS * DECODE_S_PER_TOKEN, "end", (worker, running))

    def _end(self, worker: Worker, running: Running) -> None:
        conversation = running.conversation
        self.router.in_flight.finished(running.request.request_id, served=True)
        conversation.tokens += self._tokens(ANSWER_TOKENS)
        if conversation.turns_left:
            self._at(self.now + self._random.expovariate(1 / THINK_S), "turn", conversation)
        worker.active -= 1
        if worker.queue:
            self._begin(worker, worker.queue.pop(0))
        self._report(worker)

    def _report(self, worker: Worker) -> None:
        # One frontend: nobody else has anything there.
        self.router.load.reported(worker.name, [rank_report(waiting=len(worker.queue))])


def index_bytes(indexes: BlockIndexes) -> int:
    """Memory of the index of known blocks, by adding up its objects."""
    table = indexes.known._chunks
    shards = table._shards
    total = sum(map(sys.getsizeof, shards)) + sum(map(sys.getsizeof, table))
    for chunk in {chunk for shard in shards for chunk in shard.values()}:
        parts = (chunk, chunk.hashes, chunk.ends, chunk.masks, *chunk.masks)
        total += sum(map(sys.getsizeof, parts))
    return total


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


async def simulate(size: int, mode: BuiltInMode, seconds: float) -> dict[str, float]:
    """Run one fleet in one mode and return its figures."""
    simulation = Simulation(size, mode, seconds)
    await simulation.run()
    figures, indexes = simulation.figures, simulation.workers.indexes
    assert indexes is not None
    computed = [worker.computed for worker in simulation.workers.by_id.values()]
    result = {
        "requests": len(figures.decision_us),
        "hit_ratio": round(figures.cached_tokens / figures.prompt_tokens, 4),
        "predicted_over_realised": round(
            figures.predicted_tokens / max(figures.cached_tokens, 1), 4
        ),
        "imbalance": round(max(computed) * len(computed) / sum(computed), 3),
        "first_token_ms_p50": round(quantile(figures.first_token_s, 0.5) * 1e3, 1),
        "first_token_ms_p99": round(quantile(figures.first_token_s, 0.99) * 1e3, 1),
        "decide_us_p50": round(quantile(figures.decision_us, 0.5), 1),
        "decide_us_p99": round(quantile(figures.decision_us, 0.99), 1),
        "index_blocks": len(indexes.known._chunks),
        "index_mb": round(index_bytes(indexes) / 1e6, 2),
    }
    await simulation.router.close()
    return result


def plot(results: dict[str, dict[int, dict[str, float]]], file: Path) -> bool:
    """Draw the figures against fleet size; whether matplotlib is there to do it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed, so nothing is drawn: pip install '.[bench]'")
        return False
    panels = {
        "hit_ratio": "share of prompt tokens from cache",
        "imbalance": "tokens computed, busiest worker over mean",
        "first_token_ms_p50": "time to first token, p50, ms",
        "decide_us_p50": "decision, p50, µs",
        "index_mb": "index, MB",
    }
    figure = Figure(figsize=(4 * len(panels), 3.6), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for mode, by_size in results.items():
            axes.plot(list(by_size), [one[key] for one in by_size.values()], "o-", label=mode)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("workers")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)
    return True


async def run(sizes: Sequence[int], seconds: float) -> dict[str, dict[int, dict[str, float]]]:
    """All fleets in all modes, printed as they end."""
    results: dict[str, dict[int, dict[str, float]]] = {mode.value: {} for mode in MODES}
    header = ""
    for size in sizes:
        for mode in MODES:
            with telling(f"simulating {size} workers, {mode.value}"):
                figures = await simulate(size, mode, seconds)
            results[mode.value][size] = figures
            if not header:
                header = "".join(f"{name:>24}" for name in figures)
                print(f"{'workers':>8} {'mode':<14}{header}")
            cells = "".join(f"{value:>24}" for value in figures.values())
            print(f"{size:>8} {mode.value:<14}{cells}", flush=True)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(), help="directory of the plot")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=12.0, help="simulated time of arrivals")
    args = parser.parse_args()
    results = asyncio.run(run(args.workers, args.seconds))
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "router_scale.png"
    drawn = plot(results, file)
    print(json.dumps({"results": results, "plot": str(file) if drawn else None}))


if __name__ == "__main__":
    main()

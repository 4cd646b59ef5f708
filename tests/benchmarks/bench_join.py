"""How long a frontend that joins a warm fleet takes to know all that it holds.

``python -m tests.benchmarks.bench_join`` prints progress and ends with one JSON line. Real
publishers in processes of their own, without engines, publish until their buffers have wrapped
several thousand batches ago, and go on; then a real router joins. The same with vLLM's publisher.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import uvloop
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)

from backend_worker.kv_events.event_publisher import fleet_events
from common.identity import BlockHash, Incarnation, Target, WorkerId
from frontend.router.index import EXACT
from frontend.router.inputs import EventSource, RoutableWorker
from frontend.router.router import Router
from tests.fakes.none_hash import none_hash_for

BLOCK_SIZE = 16
PROMPT_BLOCKS = 128
"""Blocks of one prompt: 2,048 tokens."""

RANKS_PER_WORKER = 4
ALGORITHM = "sha256_cbor"
PUBLISHING_PROCESSES = 2
_POLL_INTERVAL_S = 0.001


class Fleet(NamedTuple):
    """What publishers publish.

    Attributes:
        ranks: how many there are.
        blocks: that each holds.
        batches: that each publishes before anybody joins.
        rate: batches a second afterwards, of each.
        ours: whether they are our publishers or vLLM's.
    """

    ranks: int
    blocks: int
    batches: int
    rate: float
    ours: bool


class Rank:
    """One rank's cache, whose blocks come and go, and its publisher."""

    def __init__(self, number: int, fleet: Fleet) -> None:
        config: KVEventsConfig | None = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint="tcp://*:0",
            replay_endpoint="tcp://*:0",
        )
        if fleet.ours:
            config = fleet_events(config, None, None)
        self._publisher = EventPublisherFactory.create(config)
        bound = self._publisher.get_publisher_config()
        assert bound is not None
        assert bound.replay_endpoint is not None
        self.endpoints = bound.endpoint, bound.replay_endpoint
        self._random = random.Random(number)
        self._capacity = fleet.blocks
        # So that the cache is full after three quarters of all batches.
        self._per_batch = max(2, -(-fleet.blocks * 4 // (fleet.batches * 3)))
        self._prompts: deque[list[BlockHash]] = deque([[]])
        self._held = 0

    def publish(self, blocks: int = 0) -> None:
        """One batch: a prompt goes on, or another begins, and the oldest makes room."""
        blocks = min(blocks or self._per_batch, PROMPT_BLOCKS)
        if len(self._prompts[-1]) + blocks > PROMPT_BLOCKS:
            self._prompts.append([])
        prompt = self._prompts[-1]
        parent = prompt[-1] if prompt else None
        hashes = [BlockHash(self._random.randbytes(32)) for _ in range(blocks)]
        prompt += hashes
        self._held += blocks
        events: list[BlockStored | BlockRemoved] = []
        while self._held > self._capacity:
            oldest = self._prompts[0]
            events.append(BlockRemoved(block_hashes=[oldest.pop()], medium="GPU", group_idx=0))
            self._held -= 1
            if not oldest:
                self._prompts.popleft()
        tokens = [self._random.randrange(150_000)] * (BLOCK_SIZE * blocks)
        events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=tokens,
                block_size=BLOCK_SIZE,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )
        self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def wait(self) -> None:
        """Until all is published."""
        while self._publisher._event_queue.qsize():
            time.sleep(0.01)

    def whole_prompts(self) -> list[list[BlockHash]]:
        """Some prompts that are held from beginning to end."""
        return [prompt for prompt in self._prompts if len(prompt) > 1][1:-1:50]

    def held(self) -> int:
        """Blocks."""
        return self._held

    def close(self) -> None:
        """Free the ports."""
        self._publisher.shutdown()


def publish(numbers: list[int], fleet: Fleet, pipe: Connection) -> None:
    """A process: fill caches, say where, go on until told to stop, say what is held."""
    ranks = [Rank(number, fleet) for number in numbers]
    for rank in ranks:
        for _ in range(fleet.batches):
            rank.publish()
        rank.wait()
    pipe.send([rank.endpoints for rank in ranks])
    pause = 1 / (fleet.rate * len(ranks)) if fleet.rate else 0.0
    while pause and not pipe.poll(0):
        for rank in ranks:
            rank.publish(blocks=1)
            time.sleep(pause)
    pipe.recv()
    pipe.send([(rank.held(), rank.whole_prompts()) for rank in ranks])
    pipe.recv()
    for rank in ranks:
        rank.close()


class Publishers:
    """The processes, from the parent's side."""

    def __init__(self, fleet: Fleet) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._numbers: list[int] = []
        self._processes = []
        for process in range(PUBLISHING_PROCESSES):
            numbers = list(range(process, fleet.ranks, PUBLISHING_PROCESSES))
            ours, theirs = context.Pipe()
            started = context.Process(target=publish, args=(numbers, fleet, theirs), daemon=True)
            started.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(started)
            self._numbers += numbers

    def endpoints(self) -> dict[int, tuple[str, str]]:
        """By rank; waits until all are filled."""
        return dict(zip(self._numbers, self._received(), strict=True))

    def stop(self) -> dict[int, tuple[int, list[list[BlockHash]]]]:
        """Publish no more; how much each rank holds, and some prompts."""
        for pipe in self._pipes:
            pipe.send(None)
        return dict(zip(self._numbers, self._received(), strict=True))

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)

    def _received(self) -> list[Any]:
        return [one for pipe in self._pipes for one in pipe.recv()]


class LoopWatch:
    """How long the event loop stands still."""

    def __init__(self) -> None:
        self.stops_ms: list[float] = []
        self.busy_ms: list[float] = []

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            began, busy = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_POLL_INTERVAL_S)
            self.stops_ms.append((time.perf_counter() - began - _POLL_INTERVAL_S) * 1e3)
            self.busy_ms.append((time.thread_time() - busy) * 1e3)


class Joined(NamedTuple):
    """What came of a frontend that joined.

    Attributes:
        seconds: until all ranks were exact; None if they never were.
        exact: ranks that are, in the end.
        blocks: known in the end.
        right: whether that is what the ranks hold, prompt by prompt.
        cpu_s: processor time that the frontend took until then.
        stop_ms: longest that the event loop stood still, by the clock.
        busy_ms: and by the processor time that it took itself meanwhile.
        reason: the state of one rank that is not exact.
    """

    seconds: float | None
    exact: int
    blocks: int
    right: bool
    cpu_s: float
    stop_ms: float
    busy_ms: float
    reason: str


async def measure_join(fleet: Fleet, publishers: Publishers, patience_s: float) -> Joined:
    """Let a router join.

    Args:
        patience_s: how long to wait until all ranks are exact.
    """
    endpoints = await asyncio.to_thread(publishers.endpoints)
    router = Router()
    watch = LoopWatch()
    watching = asyncio.create_task(watch.run())
    workers = [worker(first, fleet, endpoints) for first in range(0, fleet.ranks, RANKS_PER_WORKER)]
    targets = [target for one in workers for target in one.targets]
    roster = router.roster

    def exact() -> int:
        return sum(roster.state(target) == EXACT for target in targets)

    def blocks() -> int:
        return sum(roster.indexes.known.holdings(target) for target in targets)

    cpu_s = -time.process_time()
    began = said = time.perf_counter()
    for one in workers:
        await roster.add(one)
    while exact() < len(targets) and time.perf_counter() - began < patience_s:
        await asyncio.sleep(0.01)
        if time.perf_counter() - said > 0.5:
            said = time.perf_counter()
            print(f"{said - began:5.1f} s: {exact()} ranks exact, {blocks():,} blocks", flush=True)
    seconds = time.perf_counter() - began
    cpu_s += time.process_time()
    watching.cancel()
    all_exact = exact() == len(targets)
    reasons = [state.reason for state in map(roster.state, targets) if state != EXACT]
    held = await asyncio.to_thread(publishers.stop)
    expected = sum(count for count, _ in held.values())
    for _ in range(600):  # what was published last is on its way
        if not all_exact or blocks() == expected:
            break
        await asyncio.sleep(0.05)
    right = all(
        roster.indexes.known.match(prompt).get(target_of(rank)) == len(prompt)
        for rank, (_, prompts) in held.items()
        for prompt in prompts
    )
    found = Joined(
        seconds if all_exact else None,
        exact(),
        blocks(),
        right and blocks() == expected,
        cpu_s,
        max(watch.stops_ms),
        max(watch.busy_ms),
        reasons[0] if reasons else "",
    )
    await router.close()
    return found


def target_of(rank: int) -> Target:
    """Which worker and rank one of the fleet's ranks is."""
    return Target(WorkerId(f"w{rank // RANKS_PER_WORKER}"), rank % RANKS_PER_WORKER)


def worker(first: int, fleet: Fleet, endpoints: dict[int, tuple[str, str]]) -> RoutableWorker:
    """The worker that has a rank as its first."""
    ranks = range(first, min(first + RANKS_PER_WORKER, fleet.ranks))
    return RoutableWorker(
        worker_id=target_of(first).worker_id,
        incarnation=Incarnation("1"),
        ranks=tuple(target_of(rank).rank for rank in ranks),
        block_size=BLOCK_SIZE,
        hash_algorithm=ALGORITHM,
        none_hash=none_hash_for(ALGORITHM),
        event_sources=tuple(EventSource(target_of(rank).rank, *endpoints[rank]) for rank in ranks),
        kv_tokens=fleet.blocks * BLOCK_SIZE,
    )


def join(fleet: Fleet, patience_s: float) -> Joined:
    """Start publishers, join them, stop them."""
    publisher = "ours" if fleet.ours else "vLLM's"
    print(
        f"{fleet.ranks} ranks of {fleet.blocks:,} blocks, {fleet.batches:,} batches each, "
        f"publisher: {publisher}",
        flush=True,
    )
    publishers = Publishers(fleet)
    try:
        joined = uvloop.run(measure_join(fleet, publishers, patience_s))
    finally:
        publishers.close()
    print(joined, flush=True)
    return joined


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="held by all ranks together")
    parser.add_argument("--batches", type=int, default=12_000, help="published before, by each")
    parser.add_argument("--rate", type=float, default=10.0, help="batches a second and rank, later")
    parser.add_argument(
        "--plain-s", type=float, default=10.0, help="how long to wait with vLLM's publisher; 0 not"
    )
    args = parser.parse_args()
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"
    fleet = Fleet(args.ranks, args.blocks // args.ranks, args.batches, args.rate, ours=True)
    joined = join(fleet, patience_s=60.0)
    plain = join(fleet._replace(ours=False), args.plain_s) if args.plain_s else None
    print(
        json.dumps(
            {
                "join_s_1m_blocks": None if joined.seconds is None else round(joined.seconds, 2),
                "exact_ranks": joined.exact,
                "blocks": joined.blocks,
                "right": joined.right,
                "cpu_s": round(joined.cpu_s, 2),
                "loop_stop_ms_max": round(joined.stop_ms, 1),
                "loop_busy_ms_max": round(joined.busy_ms, 1),
                "plain_exact_ranks": None if plain is None else plain.exact,
                "plain_reason": None if plain is None else plain.reason,
            }
        )
    )


if __name__ == "__main__":
    main()

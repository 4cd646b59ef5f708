"""Speed and memory of routing, beside the same work done by ``ai-dynamo-runtime``.

``python -m tests.benchmarks.bench_router`` prints a table and ends with one JSON line.
One core, one process; 64 workers and 1 M blocks of 16 tokens indexed. Without the peer
installed (extra ``bench``) its columns are empty.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from common.identity import (
    BlockHash,
    Incarnation,
    MmHash,
    MmIdentifier,
    RequestId,
    Target,
    WorkerId,
)
from frontend.router.event_wire import END_OF_REPLAY
from frontend.router.events.event_stream import EventStream
from frontend.router.events.progress import StreamStatistics
from frontend.router.hashing.block_hasher import (
    BlockHasher,
    MediaSpan,
    block_mm_infos,
)
from frontend.router.index.indexes import EXACT, BlockIndexes, IndexState, TargetBlocks
from frontend.router.index.kv_index import KvIndex
from frontend.router.inputs import EventSource, MediaNeed, RoutableWorker, RoutingRequest
from frontend.router.router import Router
from tests.fakes.none_hash import none_hash_for

BLOCK_SIZE = 16
WORKERS = 64
VOCABULARY = 151_000
SHORT, LONG = 2048, 32_768
"""Tokens of the two prompts."""

ALGORITHM = "sha256_cbor"
NONE_HASH = none_hash_for(ALGORITHM)


def peer_tree() -> Any | None:
    """An empty ``RadixTree`` of the peer; ``None`` if it is not installed."""
    try:
        from dynamo.llm import RadixTree
    except ImportError:
        return None
    return RadixTree()


def copies(hashes: Sequence[BlockHash]) -> list[BlockHash]:
    """The same hashes as other objects, as hashing a prompt anew would make them."""
    return [BlockHash(bytes(bytearray(one))) for one in hashes]


def quantiles(micros: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    ordered = sorted(micros)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def measure(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """p50 and p99 of one call, in microseconds."""
    micros = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        micros.append((time.perf_counter() - started) * 1e6)
    return quantiles(micros)


class Traffic:
    """Random prompts that continue one of a few shared beginnings.

    Args:
        blocks: how many to index in all.
    """

    def __init__(self, blocks: int) -> None:
        self._random = random.Random(1)
        self._hasher = BlockHasher(BLOCK_SIZE, ALGORITHM, NONE_HASH)
        self.blocks = blocks
        self.kept: dict[int, list[list[int]]] = {SHORT: [], LONG: []}
        """Some of the indexed prompts by length, to be asked for later."""
        self._beginnings = [self.tokens(SHORT // 4) for _ in range(32)]

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]

    def hash(self, tokens: Sequence[int]) -> list[BlockHash]:
        return self._hasher.hash(tokens, ())

    def prompts(self) -> Iterator[tuple[int, list[BlockHash]]]:
        """Worker and blocks of every indexed prompt, one in 200 of them long."""
        indexed = number = 0
        while indexed < self.blocks:
            length = LONG if number % 200 == 0 else SHORT
            beginning = self._random.choice(self._beginnings)
            tokens = [*beginning, *self.tokens(length - len(beginning))]
            if number % 25 == 0:
                self.kept[length].append(tokens)
            hashes = self.hash(tokens)
            yield number % WORKERS, hashes
            indexed += len(hashes)
            number += 1

    def continued(self, length: int) -> list[int]:
        """A prompt of which three quarters are indexed."""
        known = self._random.choice(self.kept[length])
        return known[: length * 3 // 4] + self.tokens(length // 4)


# Hashing


def hash_times(tokens: list[int]) -> dict[str, float]:
    """Microseconds per block: ours, ours with one large image, vLLM's."""
    blocks = len(tokens) // BLOCK_SIZE
    hasher = BlockHasher(BLOCK_SIZE, ALGORITHM, NONE_HASH)
    span = MediaSpan(MmIdentifier("i" * 64), 64, len(tokens) - 128)
    theirs = get_request_block_hasher(BLOCK_SIZE, sha256_cbor)
    request = Request("r", tokens, SamplingParams(max_tokens=1), None)
    assert hasher.hash(tokens, ()) == theirs(request)

    def with_image() -> None:
        hasher.hash(tokens, block_mm_infos(len(tokens), BLOCK_SIZE, [span]))

    def per_block(work: Callable[[], object], repeats: int) -> float:
        return measure(work, repeats)[0] / blocks

    return {
        "ours": per_block(lambda: hasher.hash(tokens, ()), 60),
        "ours with an image": per_block(with_image, 60),
        "vllm": per_block(lambda: theirs(request), 15),
    }


# Memory


def memory_of(fill: Callable[[], object]) -> int:
    """Bytes by which a fresh process grows when it fills something."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def run() -> None:
        gc.collect()
        before = resident_bytes()
        kept = fill()
        gc.collect()
        sending.send(resident_bytes() - before)
        del kept

    process = context.Process(target=run)
    process.start()
    # Ours alone was left open by the fork: without this a dead child would not be noticed.
    sending.close()
    try:
        return int(receiving.recv())
    finally:
        process.join()


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def fill_index(blocks: int) -> KvIndex:
    index = KvIndex()
    for number in range(blocks // 128):
        hashes = [BlockHash(os.urandom(32)) for _ in range(128)]
        index.store(Target(WorkerId(str(number % WORKERS)), 0), hashes)
    return index


def fill_peer(blocks: int) -> object:
    tree = peer_tree()
    assert tree is not None
    for number in range(blocks // 128):
        hashes = [BlockHash(os.urandom(32)) for _ in range(128)]
        tree.apply_event(number % WORKERS, peer_stored(number, hashes))
    tree.find_matches([0])
    return tree


def peer_stored(number: int, hashes: Sequence[BlockHash]) -> bytes:
    """A store event as the peer reads it: a chain from the root, JSON, 63-bit hashes."""
    blocks = [{"block_hash": peer_hash(one), "tokens_hash": peer_hash(one)} for one in hashes]
    stored = {"parent_hash": None, "blocks": blocks}
    return msgspec.json.encode({"event_id": number, "data": {"stored": stored}, "dp_rank": 0})


def peer_hash(block: BlockHash) -> int:
    return int.from_bytes(block[:8], "big") >> 1


# Matching


def match_times(
    traffic: Traffic, index: KvIndex, tree: Any | None, length: int, repeats: int
) -> tuple[tuple[float, float], tuple[float, float] | None]:
    """p50 and p99 of a match in microseconds: ours, and the peer's on the same prompts."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        hashes = traffic.hash(traffic.continued(length))
        numbers = [peer_hash(one) for one in hashes]
        started = time.perf_counter()
        depths = index.match(hashes)
        ours.append((time.perf_counter() - started) * 1e6)
        if tree is not None:
            started = time.perf_counter()
            scores = tree.find_matches(numbers).scores
            theirs.append((time.perf_counter() - started) * 1e6)
            found = {int(target.worker_id): depth for target, depth in depths.items()}
            assert found == {worker: depth for (worker, _), depth in scores.items()}
    return quantiles(ours), quantiles(theirs) if theirs else None


# Deciding


class KnownFeed:
    """A feed that is always exact; the benchmark fills the index itself."""

    def start(self) -> None: ...

    async def close(self) -> None: ...

    def state(self, rank: int) -> IndexState:
        return EXACT

    def served(self, rank: int, routed_at: float) -> None: ...

    def emptied(self, at: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def statistics(self) -> dict[int, StreamStatistics]:
        return {}


class KnownFeeds:
    """Gives the benchmark the router's indexes."""

    def __init__(self) -> None:
        self.indexes: BlockIndexes | None = None

    def feed(self, worker: RoutableWorker, indexes: BlockIndexes) -> KnownFeed:
        self.indexes = indexes
        return KnownFeed()

    def close(self) -> None: ...


async def router_with_workers(memo_tokens: int) -> tuple[Router, BlockIndexes]:
    """A router over empty workers that can run 64 requests each."""
    feeds = KnownFeeds()
    router = Router(feeds=feeds, seed=1)
    for number in range(WORKERS):
        await router.roster.add(
            RoutableWorker(
                worker_id=WorkerId(str(number)),
                incarnation=Incarnation("1"),
                ranks=(0,),
                block_size=BLOCK_SIZE,
                hash_algorithm=ALGORITHM,
                none_hash=NONE_HASH,
                event_sources=(EventSource(0, "unused", "unused"),),
                max_num_seqs=64,
            )
        )
    for memo in router.roster.hashers.values():
        memo._max_tokens = memo_tokens
    assert feeds.indexes is not None
    return router, feeds.indexes


def decide_times(
    router: Router, prompts: list[list[int]], media: Sequence[MediaNeed] = ()
) -> tuple[float, float]:
    """p50 and p99 of whole decisions in microseconds, hashing included.

    About 500 requests are under way at any time.
    """
    micros: list[float] = []
    running: list[RequestId] = []
    for number, tokens in enumerate(prompts):
        request_id = RequestId(f"{len(tokens)}-{number}-{len(media)}")
        started = time.perf_counter()
        router.route(RoutingRequest(request_id, tokens, media))
        micros.append((time.perf_counter() - started) * 1e6)
        router.in_flight.first_token(request_id)
        running.append(request_id)
        if len(running) > 500:
            router.in_flight.finished(running.pop(0), served=True)
    for request_id in running:
        router.in_flight.finished(request_id, served=True)
    return quantiles(micros)


# Events


def event_rate(batches: int) -> tuple[float, float]:
    """Block events per second from bytes to index: ours, and the peer's (0 without it).

    A worker at work: each batch stores a prompt's 128 blocks and evicts 128 others, one
    event each as vLLM sends them. For the peer the same as its JSON.
    """
    chains = [[BlockHash(os.urandom(32)) for _ in range(128)] for _ in range(batches)]
    encoder = msgspec.msgpack.Encoder()
    messages, peer_messages = [], []
    for number, chain in enumerate(chains):
        gone = list(reversed(chains[number - 20])) if number >= 20 else []
        events: list[BlockStored | BlockRemoved] = [
            BlockRemoved(block_hashes=[one], medium="GPU", group_idx=0) for one in gone
        ]
        events.append(
            BlockStored(
                block_hashes=chain,
                parent_block_hash=None,
                token_ids=random.choices(range(VOCABULARY), k=128 * BLOCK_SIZE),
                block_size=BLOCK_SIZE,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=[None] * 128,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )
        messages.append(encoder.encode(KVEventBatch(ts=float(number), events=list(events))))
        peer_messages += [
            msgspec.json.encode(
                {
                    "event_id": number,
                    "data": {"removed": {"block_hashes": [peer_hash(one)]}},
                    "dp_rank": 0,
                }
            )
            for one in gone
        ]
        peer_messages.append(peer_stored(number, chain))
    indexes = BlockIndexes.empty()
    target = Target(WorkerId("w"), 0)
    indexes.slots.open(target)
    stream = EventStream(TargetBlocks(target, BLOCK_SIZE, 0, indexes), "w")
    question = stream.on_connected(0.0)
    assert question is not None
    stream.on_replayed(question.attempt, END_OF_REPLAY, b"", 1.0)
    block_events = batches * 128 + (batches - 20) * 128
    started = time.perf_counter()
    for number, message in enumerate(messages):
        stream.on_live(number.to_bytes(8, "big"), message, 0.0)
    ours = block_events / (time.perf_counter() - started)
    assert stream.state == EXACT
    assert indexes.known.holdings(target) == 20 * 128
    tree = peer_tree()
    if tree is None:
        return ours, 0.0
    started = time.perf_counter()
    for message in peer_messages:
        tree.apply_event(0, message)
    tree.find_matches([0])
    return ours, block_events / (time.perf_counter() - started)


# The whole


def row(name: str, ours: str, peer: str = "") -> None:
    print(f"{name:<52}{ours:>22}{peer:>22}")


def both(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.1f} / {pair[1]:.1f}"


async def run(blocks: int, repeats: int) -> dict[str, float | None]:
    """Measure everything, print the table and return the JSON line's fields."""
    peer = peer_tree() is not None
    row("", "mmrouter", "ai-dynamo-runtime" if peer else "")
    if not peer:
        print("ai-dynamo-runtime is not installed, so nothing is compared: pip install '.[bench]'")

    # First, while this process is small and has no threads: its children measure themselves.
    ours_bytes = memory_of(lambda: fill_index(blocks)) / blocks
    peer_bytes = memory_of(lambda: fill_peer(blocks)) / blocks if peer else None
    row(
        "resident bytes per indexed block",
        f"{ours_bytes:.0f}",
        "" if peer_bytes is None else f"{peer_bytes:.0f}",
    )

    traffic = Traffic(blocks)
    hashing = hash_times(traffic.tokens(LONG))
    row("hash, µs per block of 16 tokens", f"{hashing['ours']:.2f}")
    row("  with an image over the prompt", f"{hashing['ours with an image']:.2f}")
    row("  vLLM's own function", f"{hashing['vllm']:.2f}")

    # Without the memo first: every prompt is hashed from its first token to its last.
    router, indexes = await router_with_workers(memo_tokens=0)
    remembering, others = await router_with_workers(memo_tokens=1_000_000)
    tree = peer_tree()
    for number, (worker, hashes) in enumerate(traffic.prompts()):
        for known in (indexes.known, others.known):
            known.store(Target(WorkerId(str(worker)), 0), hashes)
        if tree is not None:
            tree.apply_event(worker, peer_stored(number, hashes))
    if tree is not None:
        tree.find_matches([0])

    ratios = {}
    for length in (SHORT, LONG):
        count = repeats if length == SHORT else repeats // 10
        ours, theirs = match_times(traffic, indexes.known, tree, length, count)
        row(f"match {length} tokens, µs p50 / p99", both(ours), both(theirs))
        ratios[length] = None if theirs is None else round(ours[0] / theirs[0], 3)

    image = MediaNeed(MmHash("i"), MediaSpan(MmIdentifier("i" * 64), 100, 1400), 1400, 6 << 20)
    decided = {}
    for length in (SHORT, LONG):
        count = repeats if length == SHORT else repeats // 10
        prompts = [traffic.continued(length) for _ in range(count)]
        decided[length] = decide_times(router, prompts)
        row(f"decide {length} tokens, µs p50 / p99", both(decided[length]))
        again = decide_times(remembering, prompts)
        row("  with beginnings remembered from recent prompts", both(again))
    prompts = [traffic.continued(SHORT) for _ in range(repeats)]
    row(f"decide {SHORT} tokens with an image", both(decide_times(router, prompts, [image])))
    await router.close()
    await remembering.close()

    rates = [event_rate(600) for _ in range(5)]
    events = statistics.median(ours for ours, _ in rates)
    peer_events = statistics.median(theirs for _, theirs in rates)
    row(
        "block events applied per second, from bytes",
        f"{events:,.0f}",
        f"{peer_events:,.0f}" if peer else "",
    )
    return {
        "hash_us_per_block": round(hashing["ours"], 3),
        "decide_us_p50_2k": round(decided[SHORT][0], 1),
        "decide_us_p99_2k": round(decided[SHORT][1], 1),
        "decide_us_p50_32k": round(decided[LONG][0], 1),
        "match_vs_peer": ratios[SHORT],
        "match_vs_peer_32k": ratios[LONG],
        "events_per_s": round(events),
        "bytes_per_block": round(ours_bytes, 1),
        "vllm_hash_us_per_block": round(hashing["vllm"], 3),
        "peer_events_per_s": round(peer_events) if peer else None,
        "peer_bytes_per_block": None if peer_bytes is None else round(peer_bytes, 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks indexed")
    parser.add_argument("--repeats", type=int, default=2_000, help="decisions measured")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(run(args.blocks, args.repeats))))


if __name__ == "__main__":
    main()

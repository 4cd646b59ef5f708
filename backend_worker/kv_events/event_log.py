"""Log of one rank's KV events: the last batches, and a snapshot of all before them.

A reader that misses more than a few batches gets a *snapshot*: batches whose first event clears the
cache and whose others store all blocks that the engine holds. Snapshot batches are numbered just
before the next real batch, so that a reader continues from there. The newest batch follows a
snapshot as published: readers of vLLM's protocol may identify an engine's run by their last batch.

Snapshot events are vLLM's own, without tokens and extra keys, which would be most of their size. A
reader that goes by hashes needs neither.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from msgspec.structs import replace
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)

from backend_worker.kv_events.held_blocks import HeldBlocks, Shelf

logger = logging.getLogger(__name__)

Batch: TypeAlias = KVEventBatch  # the events of one engine step

_OWN_MEDIA = frozenset({None, MEDIUM_GPU, MEDIUM_CPU})

_OF_KIND = (
    "block_size", "lora_id", "medium", "lora_name", "group_idx", "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window", "locality", "ownership",
)  # fmt: skip
_NONE: list[int | bytes] = []  # one for all: there may be millions of runs

_encode = msgspec.msgpack.Encoder().encode


def fold(held: HeldBlocks, batch: Batch) -> None:
    """Apply a batch to the held blocks, without storage shared with other engines. Shared storage
    says nothing about this engine, and is unbounded."""
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            held.clear()
        elif event.medium not in _OWN_MEDIA or event.locality == "REMOTE":
            continue
        elif isinstance(event, BlockStored):
            _store(held, event)
        elif isinstance(event, BlockRemoved):
            held.remove(_shelf(event), event.block_hashes)


def retell(held: HeldBlocks, last: Batch, blocks: int) -> Iterator[bytes]:
    """Yield encoded batches that give any reader the same held blocks.

    Args:
        held: must not change before the last batch was taken.
        last: batch applied last, for its time and rank.
        blocks: minimum per batch except the last; up to a run more.
    """
    events: list[KVCacheEvent] = [AllBlocksCleared()]
    count = 0
    for run, times in held.told():
        if count >= blocks and run.hashes:
            yield _batch(events, last)
            events, count = [], 0
        stored = replace(run.kind, block_hashes=run.hashes, parent_block_hash=run.parent)
        events += [stored] * times
        count += len(run.hashes) * times
    yield _batch(events, last)


def _batch(events: list[KVCacheEvent], last: Batch) -> bytes:
    return _encode(KVEventBatch(last.ts, events, last.data_parallel_rank))


def _shelf(event: BlockStored | BlockRemoved) -> Shelf:
    return Shelf(event.group_idx or 0, event.medium == MEDIUM_CPU)


def _store(held: HeldBlocks, event: BlockStored) -> None:
    kind = BlockStored(_NONE, None, _NONE, **{name: getattr(event, name) for name in _OF_KIND})
    hashes = event.block_hashes
    # vLLM leaves out blocks that a group skips, but not their tokens.
    chained = len(event.token_ids) == len(hashes) * event.block_size
    held.store(_shelf(event), hashes, event.parent_block_hash, kind, chained=chained)


Message = tuple[int, bytes]  # number and payload of a batch

REPLAYED = 400  # maximum batches replayed singly; for more a snapshot is faster

LEAST_KEPT = 64
"""Batches kept however few the operator asks for: a snapshot needs some numbers to bear."""

_MAX_MESSAGES = 256  # of a snapshot

_BLOCKS_PER_MESSAGE = 1000
"""If that makes no more messages: about 35 kB, which a reader applies in a millisecond."""

_MAX_BLOCKS = 1 << 22  # beyond it no account is kept
_FOLLOWING = 100  # maximum batches behind a snapshot that further readers still get
_FRESH_S = 1.0  # age up to which further readers get it anyway: limits the rate of snapshots
_KEPT_S = 10.0  # lifetime of an unused snapshot


@dataclass(slots=True)
class Snapshot:
    """All blocks held at one moment.

    Attributes:
        base: number of the first batch that is not included.
        rest: generates the remaining payloads; None when complete.
        following: later batches, and the newest one at that moment.
        used: time of creation or last use, in monotonic seconds.
    """

    base: int
    rest: Iterator[bytes] | None
    payloads: list[bytes] = field(default_factory=list)
    following: list[Message] = field(default_factory=list)
    used: float = 0.0
    made: float = 0.0

    def fits(self, start: int) -> bool:
        """Return whether all its numbers are above ``start``, the reader's first."""
        return self.base - len(self.payloads) > start


class EventLog:
    """Batches of one rank, in vLLM's buffer. For one thread, which calls :meth:`work` when idle."""

    def __init__(self, kept: deque[Message], clock: Callable[[], float] = time.monotonic) -> None:
        self._kept = kept
        self._clock = clock
        self._held: HeldBlocks | None = HeldBlocks()
        self._last: Batch | None = None
        self._unfolded: deque[tuple[int, Batch]] = deque()
        self._snapshot: Snapshot | None = None
        self._missing = -1
        self._next = 0

    def published(self, number: int, payload: bytes | None, batch: Batch) -> None:
        """Add a published batch; without a payload it can't be replayed."""
        self._next = number + 1
        if payload is None:
            self._missing = number
            self._snapshot = None
        elif self._snapshot is not None:
            self._snapshot.following.append((number, payload))
        if self._held is not None:
            self._unfolded.append((number, batch))
            with self._or_give_up():
                self._fold()

    def answer(self, start: int) -> list[Message] | None:
        """Return all messages from ``start`` on; None until :meth:`work` has made a snapshot."""
        kept = self._kept
        if not kept or start > kept[-1][0]:
            return []
        whole = start >= kept[0][0] and start > self._missing
        few = whole and kept[-1][0] - start < REPLAYED
        if self._last is None or self._held is None or few:
            return [message for message in kept if message[0] >= start]
        snapshot = self._snapshot
        if snapshot is not None and snapshot.rest is not None:
            return None
        if snapshot is None or not self._serves(snapshot, start):
            if self._base - start < 2:  # a snapshot would have no number
                return [message for message in kept if message[0] >= start]
            self._begin(self._held, self._last, start)
            return None
        snapshot.used = self._clock()
        first = snapshot.base - len(snapshot.payloads)
        return [*enumerate(snapshot.payloads, first), *snapshot.following]

    def work(self) -> bool:
        """Make a part of a snapshot (well below 1 ms), or expire one; return if there is more."""
        snapshot = self._snapshot
        if snapshot is None:
            return False
        if snapshot.rest is None:
            if self._clock() - snapshot.used > _KEPT_S:
                self._snapshot = None
            return False
        with self._or_give_up():
            payload = next(snapshot.rest, None)
        if payload is not None:
            snapshot.payloads.append(payload)
            return True
        snapshot.rest = None
        snapshot.used = snapshot.made = self._clock()
        self._fold()
        return False

    @property
    def _base(self) -> int:
        """Number of the first unfolded batch."""
        return self._unfolded[0][0] if self._unfolded else self._next

    def _serves(self, snapshot: Snapshot, start: int) -> bool:
        fresh = self._clock() - snapshot.made < _FRESH_S
        return snapshot.fits(start) and (fresh or len(snapshot.following) <= _FOLLOWING)

    def _begin(self, held: HeldBlocks, last: Batch, start: int) -> None:
        """Begin a snapshot; no batch is folded before its end."""
        base = self._base
        messages = max(1, min(_MAX_MESSAGES, base - start - 1))
        blocks = max(_BLOCKS_PER_MESSAGE, -(-held.to_tell // messages))
        following = [message for message in self._kept if message[0] >= base]
        self._snapshot = Snapshot(base, retell(held, last, blocks), following=following)

    def _fold(self) -> None:
        """Fold all batches but the newest, unless a snapshot is being made."""
        held = self._held
        if held is None or (self._snapshot is not None and self._snapshot.rest is not None):
            return
        unfolded = self._unfolded
        while len(unfolded) > 1 or (unfolded and unfolded[0][0] == self._missing):
            _, self._last = unfolded.popleft()
            fold(held, self._last)
        if len(held) > _MAX_BLOCKS:
            logger.error("no more replays: the engine holds more than %d blocks", _MAX_BLOCKS)
            self._give_up()

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """Give up the account if the block fails: its state is then uncertain."""
        failed = True
        try:
            yield
            failed = False
        finally:
            if failed:
                self._give_up()

    def _give_up(self) -> None:
        """Stop the account: only batches in the buffer can be replayed from now on."""
        self._held = self._snapshot = None
        self._unfolded.clear()

"""Reading KV event messages: bytes in, changes of a cache out.

Decodes with vLLM's own structs (0.32.0 and 0.33.0, ``vllm.distributed.kv_events``), which
ignore fields they don't know. Sequence numbers and what to do on loss are in
``event_stream.py``.
"""

from enum import Enum
from typing import NamedTuple, TypeAlias

import msgspec
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from common.errors import MmRouterError
from common.identity import BlockHash

SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES
"""In place of a sequence number: the replay is complete."""

_HASH_BYTES = 32
_MAX_GROUPS = 64
"""Far more than any model has; a bound for hostile messages."""

# vLLM's ``KVCacheSpecKind`` values of groups in which a hit needs every block.
_EVERY_BLOCK = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
# Those in which a hit needs only the blocks inside the window before its end.
_WINDOWED = frozenset({"sliding_window", "sliding_window_mla"})
# Those in which it needs the last block only.
_LAST_BLOCK = frozenset({"mamba"})


class MalformedEventError(MmRouterError):
    """An event message isn't what vLLM sends.

    Attributes:
        kind: constant word for counting.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        super().__init__(f"malformed KV event ({kind}): {detail}")


class Need(Enum):
    """Which blocks of a group a prefix hit needs."""

    EVERY = "every block"
    WINDOW = "the blocks of a window"
    UNKNOWN = "not modelled"


class Stored(NamedTuple):
    """Blocks entered a cache.

    Attributes:
        hashes: the blocks.
        block_size: tokens per block of their group.
        group: KV cache group.
        need: which blocks of this group a hit needs.
        window: tokens of a sliding window; 1 if only the last block matters.
        kind: vLLM's word for the group.
        offloaded: whether the copy is outside the accelerator.
        parent: the block before the first, if there is one.
        chained: whether each block is the child of the one before.
    """

    hashes: list[BlockHash]
    block_size: int
    group: int
    need: Need
    window: int
    kind: str
    offloaded: bool
    parent: BlockHash | None
    chained: bool


class Removed(NamedTuple):
    """Copies of blocks left a cache. Fields as in :class:`Stored`."""

    hashes: list[BlockHash]
    group: int
    offloaded: bool


class Cleared(NamedTuple):
    """A cache was emptied."""


Change: TypeAlias = Stored | Removed | Cleared


class EventBatch(NamedTuple):
    """The changes of one engine step.

    Attributes:
        time: seconds since the epoch, by the worker's clock.
        changes: in order.
    """

    time: float
    changes: list[Change]

    @property
    def begins_anew(self) -> bool:
        """Whether it says what is held, whatever was held before."""
        return bool(self.changes) and isinstance(self.changes[0], Cleared)


_decoder = msgspec.msgpack.Decoder(KVEventBatch)


def decode_sequence(frame: bytes) -> int:
    """A sequence number.

    Raises:
        MalformedEventError: the frame is not 8 bytes.
    """
    if len(frame) != SEQUENCE_BYTES:
        raise MalformedEventError("sequence", f"{len(frame)} bytes instead of {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")


def decode_batch(payload: bytes) -> EventBatch:
    """The changes in one message.

    Blocks in storage shared between workers are left out: they say nothing about one
    worker.

    Raises:
        MalformedEventError: not a batch of KV events, or hashes of another kind than
            :mod:`frontend.router.hashing.block_hasher` computes.
    """
    try:
        batch = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEventError("payload", str(error)) from error
    changes: list[Change] = []
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            changes.append(Cleared())
            continue
        if event.medium not in _LOCAL_MEDIA or event.locality == "REMOTE":
            continue
        hashes = _hashes(event.block_hashes)
        group = event.group_idx or 0
        if not 0 <= group < _MAX_GROUPS:
            raise MalformedEventError("group", f"cache group {group}")
        offloaded = event.medium not in (None, MEDIUM_GPU)
        if isinstance(event, BlockStored):
            changes.append(_stored(event, hashes, group, offloaded))
        elif isinstance(event, BlockRemoved):
            last = changes[-1] if changes else None
            if isinstance(last, Removed) and last[1:] == (group, offloaded):
                # vLLM evicts one block per event, many in a row.
                last.hashes.extend(hashes)
            else:
                changes.append(Removed(hashes, group, offloaded))
    return EventBatch(batch.ts, changes)


_LOCAL_MEDIA = frozenset({None, MEDIUM_GPU, "CPU"})


def _stored(event: BlockStored, hashes: list[BlockHash], group: int, offloaded: bool) -> Stored:
    kind = event.kv_cache_spec_kind
    window = 0
    if kind in _EVERY_BLOCK:
        need = Need.EVERY
    elif kind in _WINDOWED and event.kv_cache_spec_sliding_window:
        need, window = Need.WINDOW, event.kv_cache_spec_sliding_window
    elif kind in _LAST_BLOCK:
        need, window = Need.WINDOW, 1
    else:
        need = Need.UNKNOWN
    parent = event.parent_block_hash
    return Stored(
        hashes,
        event.block_size,
        group,
        need,
        window,
        kind or "unnamed",
        offloaded,
        BlockHash(parent) if isinstance(parent, bytes) else None,
        # vLLM leaves out blocks that a group skips, but not their tokens. Our workers' account of
        # all that they hold (backend_worker/kv_events/event_snapshot.py) has no tokens, no gaps.
        not offloaded and len(event.token_ids) in (0, len(hashes) * event.block_size),
    )


def _hashes(raw: list[bytes | int]) -> list[BlockHash]:
    """The hashes, if all are whole SHA-256 digests."""
    try:
        total = len(b"".join(raw))  # type: ignore[arg-type]
    except TypeError:
        raise MalformedEventError("integer-hashes", "hashes are cut to 64 bits") from None
    if total != _HASH_BYTES * len(raw) or len(set(map(len, raw))) > 1:  # type: ignore[arg-type]
        raise MalformedEventError("hash-length", f"hashes are not {_HASH_BYTES} bytes long")
    return raw  # type: ignore[return-value]

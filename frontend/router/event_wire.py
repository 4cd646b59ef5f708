"""Decode KV event messages: bytes in, changes of a cache out.

Reads the needed fields of vLLM's structs (0.32.0 and 0.33.0, ``vllm.distributed.kv_events``).
Tokens and extra keys, most of a message, are skipped. ``event_stream.py`` handles sequence numbers
and loss.
"""

from collections.abc import Iterator
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

import msgspec

from common.errors import MmRouterError
from common.identity import BlockHash

SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES
"""In place of a sequence number: the replay is complete."""

_HASH_BYTES = 32
_MAX_GROUPS = 64
"""Far more than any model has; a bound for hostile messages."""

_ON_DEVICE: Final = "GPU"
"""vLLM's ``MEDIUM_GPU``, by its value: importing it takes ten seconds."""

_AT_ONCE: Final = 16_384
"""Blocks of a message that are decoded before any is applied: milliseconds of the event loop, and
four times a step of 64k tokens. The rest of a larger message is decoded while it is applied."""

_EVENTS_AT_ONCE: Final = 4096
"""Events likewise: a step of 64k tokens that evicts as many blocks."""

_MAX_HASHES: Final = 1 << 18
"""Maximum hashes per event: four million tokens in blocks of 16."""

# vLLM's ``KVCacheSpecKind`` values of groups in which a hit needs every block.
_EVERY_BLOCK = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
# Kinds in which a hit needs only the blocks inside the window before its end.
_WINDOWED = frozenset({"sliding_window", "sliding_window_mla"})
# Kinds in which a hit needs the last block only.
_LAST_BLOCK = frozenset({"mamba"})


class MalformedEventError(MmRouterError):
    """An event message differs from vLLM's format; ``kind`` is a constant word for counting."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        super().__init__(f"malformed KV event ({kind}): {detail}")


class Need(Enum):
    EVERY = "every block"
    WINDOW = "the blocks of a window"
    UNKNOWN = "not modelled"


class Stored(NamedTuple):
    """Blocks entered a cache.

    Attributes:
        need: which blocks of this group a hit needs.
        window: tokens of a sliding window; 1 if only the last block matters.
        kind: vLLM's word for the group.
        offloaded: whether the copy is outside the accelerator.
        parent: the block before the first, if any.
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
    hashes: list[BlockHash]
    group: int
    offloaded: bool


class Cleared(NamedTuple): ...


Change: TypeAlias = Stored | Removed | Cleared

NOTHING: Final = Removed([], 0, False)
"""Change of an event that is irrelevant here."""


class EventBatch(NamedTuple):
    """Changes of one engine step, at a time in seconds since the epoch by the worker's clock.

    Attributes:
        changes: in order; the first of a large message.
        later: the following ones, decoded lazily. Raises MalformedEventError.
    """

    time: float
    changes: list[Change]
    later: Iterator[Change] = iter(())

    @property
    def begins_anew(self) -> bool:
        """Whether the batch is a snapshot: it replaces all blocks held before."""
        return bool(self.changes) and isinstance(self.changes[0], Cleared)


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class _BlockStored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: msgspec.Raw
    parent_block_hash: bytes | int | None
    token_ids: msgspec.Raw
    block_size: int
    medium: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: msgspec.Raw
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


_batches: Final = msgspec.msgpack.Decoder(_Batch)
_events: Final = msgspec.msgpack.Decoder(_BlockStored | _BlockRemoved | _AllBlocksCleared)
_hash_lists: Final = msgspec.msgpack.Decoder(list[bytes | int])
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_sequence(frame: bytes) -> int:
    """Decode a sequence number. Raises MalformedEventError if the frame is not 8 bytes."""
    if len(frame) != SEQUENCE_BYTES:
        raise MalformedEventError("sequence", f"{len(frame)} bytes instead of {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one message, leaving out blocks in storage shared between workers. Raises
    MalformedEventError, also for hashes that ``block_hasher.py`` does not compute.
    """
    try:
        batch = _batches.decode(payload)
    except _UNREADABLE as error:
        raise MalformedEventError("payload", str(error)) from error
    events = iter(batch.events)
    changes: list[Change] = []
    blocks = 0
    for change in _changes(islice(events, _EVENTS_AT_ONCE)):
        if change is NOTHING:
            continue
        if not isinstance(change, Cleared):
            blocks += len(change.hashes)
        last = changes[-1] if changes else None
        if isinstance(change, Removed) and isinstance(last, Removed) and last[1:] == change[1:]:
            # vLLM evicts one block per event, many in a row.
            last.hashes.extend(change.hashes)
        else:
            changes.append(change)
        if blocks >= _AT_ONCE:
            break
    return EventBatch(batch.ts, changes, _changes(events))


def _changes(events: Iterator[msgspec.Raw]) -> Iterator[Change]:
    for raw in events:
        try:
            event = _events.decode(raw)
        except _UNREADABLE as error:
            raise MalformedEventError("payload", str(error)) from error
        if isinstance(event, _AllBlocksCleared):
            yield Cleared()
            continue
        if event.medium not in _LOCAL_MEDIA or event.locality == "REMOTE":
            yield NOTHING  # lets callers pause after any event
            continue
        hashes = _hashes(event.block_hashes)
        group = event.group_idx or 0
        if not 0 <= group < _MAX_GROUPS:
            raise MalformedEventError("group", f"cache group {group}")
        offloaded = event.medium not in (None, _ON_DEVICE)
        if isinstance(event, _BlockStored):
            yield _stored(event, hashes, group, offloaded)
        else:
            yield Removed(hashes, group, offloaded)


_LOCAL_MEDIA = frozenset({None, _ON_DEVICE, "CPU"})


def _stored(event: _BlockStored, hashes: list[BlockHash], group: int, offloaded: bool) -> Stored:
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
        # vLLM leaves out blocks that a group skips, but not their tokens. Snapshots by our workers
        # (backend_worker/kv_events/event_log.py) have no tokens and no gaps.
        not offloaded and _length(event.token_ids) in (0, len(hashes) * event.block_size),
    )


def _hashes(raw: msgspec.Raw) -> list[BlockHash]:
    if _length(raw) > _MAX_HASHES:
        raise MalformedEventError("hash-count", f"an event of more than {_MAX_HASHES:,} blocks")
    try:
        hashes = _hash_lists.decode(raw)
    except _UNREADABLE as error:
        raise MalformedEventError("payload", str(error)) from error
    try:
        total = len(b"".join(hashes))  # type: ignore[arg-type]
    except TypeError:
        raise MalformedEventError("integer-hashes", "hashes are cut to 64 bits") from None
    if total != _HASH_BYTES * len(hashes) or len(set(map(len, hashes))) > 1:  # type: ignore[arg-type]
        raise MalformedEventError("hash-length", f"hashes are not {_HASH_BYTES} bytes long")
    return hashes  # type: ignore[return-value]


def _length(raw: msgspec.Raw) -> int:
    head = bytes(memoryview(raw)[:5])
    match head[0]:
        case 0xDC:
            return int.from_bytes(head[1:3], "big")
        case 0xDD:
            return int.from_bytes(head[1:5], "big")
        case first if first & 0xF0 == 0x90:
            return first & 0x0F
    raise MalformedEventError("payload", "something else where a list has to be")

"""vLLM's KV events, added up to the blocks that are held, and told again as few events.

The events told are vLLM's own, in the shape in which it publishes them. They have neither tokens
nor extra keys, which would be most of their size: whoever goes by hashes misses nothing.
"""

from collections.abc import Iterator
from typing import TypeAlias

import msgspec
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)

from backend_worker.kv_events.held_blocks import HeldBlocks, Kind, Run, Shelf

Batch: TypeAlias = KVEventBatch
"""The events of one engine step."""

_OWN_MEDIA = frozenset({None, MEDIUM_GPU, MEDIUM_CPU})

_encode = msgspec.msgpack.Encoder().encode


def fold(held: HeldBlocks, batch: Batch) -> None:
    """Change the blocks that are held as a batch says.

    Storage that other engines share is left out: what is there says nothing about this one, and
    has no end.
    """
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
    """Encoded batches after which whoever reads them holds the same, whatever he held before.

    Args:
        held: must not change before the last batch was taken.
        last: that was added to them, for its time and rank.
        blocks: at least, in each batch but the last; up to a run more.
    """
    events: list[KVCacheEvent] = [AllBlocksCleared()]
    count = 0
    for run, times in held.told():
        if count >= blocks and run.hashes:
            yield _batch(events, last)
            events, count = [], 0
        events += [_stored(run)] * times
        count += len(run.hashes) * times
    yield _batch(events, last)


def _batch(events: list[KVCacheEvent], last: Batch) -> bytes:
    return _encode(KVEventBatch(last.ts, events, last.data_parallel_rank))


def _shelf(event: BlockStored | BlockRemoved) -> Shelf:
    return Shelf(event.group_idx or 0, event.medium == MEDIUM_CPU)


def _store(held: HeldBlocks, event: BlockStored) -> None:
    kind = Kind(
        event.block_size,
        event.lora_id,
        event.medium,
        event.lora_name,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        event.locality,
        event.ownership,
    )
    hashes = event.block_hashes
    # vLLM leaves out blocks that a group skips, but not their tokens.
    chained = len(event.token_ids) == len(hashes) * event.block_size
    held.store(_shelf(event), hashes, event.parent_block_hash, kind, chained=chained)


def _stored(run: Run) -> BlockStored:
    kind = run.kind
    return BlockStored(
        block_hashes=run.hashes,
        parent_block_hash=run.parent,
        token_ids=[],
        block_size=kind.block_size,
        lora_id=kind.lora_id,
        medium=kind.medium,
        lora_name=kind.lora_name,
        group_idx=kind.group_idx,
        kv_cache_spec_kind=kind.spec_kind,
        kv_cache_spec_sliding_window=kind.window,
        locality=kind.locality,
        ownership=kind.ownership,
    )

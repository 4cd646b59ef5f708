"""Who reads a snapshot knows what he would know who has read everything."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)

from backend_worker.kv_events.event_log import fold, retell
from backend_worker.kv_events.held_blocks import HeldBlocks
from common.identity import Target, WorkerId
from frontend.router.event_wire import Stored, decode_batch
from frontend.router.index.indexes import BlockIndexes, TargetBlocks
from tests.fakes.kv_events import BLOCK_SIZE, blocks, cleared, encode, removed, stored

TARGET = Target(WorkerId("w"), 0)
NUMBERS = range(10)


class Reader:
    """A frontend's index of one rank."""

    def __init__(self) -> None:
        self.indexes = BlockIndexes.empty()
        self.indexes.slots.open(TARGET)
        self._blocks = TargetBlocks(TARGET, BLOCK_SIZE, 0, self.indexes)

    def read(self, payload: bytes) -> None:
        self._blocks.apply(decode_batch(payload))

    def knows(self) -> list[object]:
        """All that routing can ask, for blocks one by one and for the chain of all."""
        known = self.indexes.known
        windows = self.indexes.windows
        return [
            known.holdings(TARGET),
            windows.holdings(TARGET),
            [known.match(blocks(number)) for number in NUMBERS],
            known.match(blocks(*NUMBERS)),
            [windows.trim(TARGET, blocks(*NUMBERS), depth) for depth in NUMBERS],
        ]


def snapshot(events: Sequence[KVCacheEvent], blocks: int = 3) -> list[bytes]:
    held = HeldBlocks()
    batch = KVEventBatch(ts=7.0, events=list(events), data_parallel_rank=3)
    fold(held, batch)
    return list(retell(held, batch, blocks))


WINDOW: dict[str, Any] = {
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 33,
}
GROUPS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"group_idx": 0},
        {"group_idx": 1},
        {
            "group_idx": 2,
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": 33,
        },
        {"group_idx": 0, "medium": "CPU"},
        {"group_idx": 0, "medium": "STORAGE"},
        {"group_idx": 0, "medium": "CPU", "locality": "REMOTE"},
        {"group_idx": 0, "medium": None},
    ]
)
RANGES = st.tuples(st.integers(0, 9), st.integers(1, 5))


@st.composite
def any_event(draw: st.DrawFn) -> KVCacheEvent:
    kind = draw(st.sampled_from(["stored"] * 6 + ["removed"] * 4 + ["cleared"]))
    if kind == "cleared":
        return cleared()
    first, count = draw(RANGES)
    fields = dict(draw(GROUPS))
    numbers = range(first, min(first + count, 10))
    if kind == "removed":
        where = {key: fields[key] for key in fields if not key.startswith("kv_")}
        return removed(*reversed(numbers), **where)
    parent = blocks(first - 1)[0] if first else None
    tokens = [1] * (BLOCK_SIZE * len(numbers) + draw(st.sampled_from([0, 0, BLOCK_SIZE])))
    return stored(*numbers, parent_block_hash=parent, token_ids=tokens, **fields)


def possible(events: list[KVCacheEvent]) -> list[KVCacheEvent]:
    """The events without removals of what is not there."""
    there: set[object] = set()
    found: list[KVCacheEvent] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            there.clear()
            found.append(event)
            continue
        assert isinstance(event, BlockStored | BlockRemoved)
        where = event.medium or "GPU", event.group_idx
        if isinstance(event, BlockStored):
            there.update((where, one) for one in event.block_hashes)
            found.append(event)
        elif all((where, one) in there for one in event.block_hashes):
            # Copies are gone with the last, so that this one forgets too early: no harm.
            there.difference_update((where, one) for one in event.block_hashes)
            found.append(event)
    return found


@settings(max_examples=60)
@given(st.lists(any_event(), max_size=25).map(possible))
def test_a_newcomer_knows_what_a_follower_knows(events: list[KVCacheEvent]) -> None:
    follower, newcomer = Reader(), Reader()
    newcomer.read(encode([stored(3, 4)]))  # it may have read anything before
    for event in events:
        follower.read(encode([event]))
    for payload in snapshot(events):
        newcomer.read(payload)
    assert newcomer.knows() == follower.knows()
    for fields in ({"group_idx": 0}, {"group_idx": 1}, {"group_idx": 0, "medium": "CPU"}):
        for reader in (follower, newcomer):
            reader.read(encode([removed(*NUMBERS, **fields)]))
        assert newcomer.knows() == follower.knows()


def test_it_begins_anew_even_if_nothing_is_held_and_bears_time_and_rank() -> None:
    (payload,) = snapshot([])
    batch = decode_batch(payload)
    assert batch.begins_anew
    assert batch.time == 7.0
    assert payload[-1:] == b"\x03"


def test_only_the_first_of_several_begins_anew() -> None:
    payloads = snapshot([stored(1, 2), stored(3, 4, lora_name="a"), stored(5, lora_name="b")], 2)
    assert [decode_batch(one).begins_anew for one in payloads] == [True, False, False]


def test_what_was_a_chain_is_read_as_one() -> None:
    (payload,) = snapshot([stored(1, 2, 3)], 10)
    _, change = decode_batch(payload).changes
    assert isinstance(change, Stored)
    assert change.chained
    assert change.hashes == blocks(1, 2, 3)

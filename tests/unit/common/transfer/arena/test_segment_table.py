import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.transfer.arena.layout import SEGMENT_ALIGNMENT, aligned
from common.transfer.arena.segment_table import Block, SegmentTable

PAGE = SEGMENT_ALIGNMENT


class Model(RuleBasedStateMachine):
    """Any order of operations keeps the books, and room that is there is found."""

    PAGES = 16

    def __init__(self) -> None:
        super().__init__()
        self.table = SegmentTable(self.PAGES * PAGE)
        self.leases: dict[Block, int] = {}
        # Oldest first, as a list rather than the table's own clock.
        self.idle: list[Block] = []

    @rule(length=st.integers(1, PAGES * PAGE))
    def place(self, length: int) -> None:
        self._place(length)

    @rule(pages=st.integers(1, 4))
    def place_small(self, pages: int) -> None:
        self._place(pages * PAGE)

    def _place(self, length: int) -> None:
        size = aligned(length, PAGE)
        free_fits = any(block.free and block.size >= size for block in self.table)
        room = self._longest_unleased() >= size
        at = {block.offset: block for block in self.idle}
        placement = self.table.place(length)
        assert (placement is not None) == room
        if placement is None:
            return
        assert placement.block.size == size
        # Nothing makes way without need.
        assert not (free_fits and placement.evicted)
        for offset in placement.evicted:
            self.idle.remove(at[offset])
        self.leases[placement.block] = 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.leases)))
        self.table.release(block)
        self.leases[block] -= 1
        if self.leases[block] == 0:
            del self.leases[block]
            self.idle.append(block)

    @precondition(lambda self: self.leases or self.idle)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([*self.leases, *self.idle]))
        self.table.lease(block)
        if block in self.idle:
            self.idle.remove(block)
        self.leases[block] = self.leases.get(block, 0) + 1

    @precondition(lambda self: 1 in self.leases.values())
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b, count in self.leases.items() if count == 1]))
        self.table.discard(block)
        del self.leases[block]

    @invariant()
    def blocks_cover_the_arena_without_gap_or_overlap(self) -> None:
        end = 0
        was_free = False
        for block in self.table:
            assert block.offset == end
            assert block.size > 0
            assert block.size % PAGE == 0
            # Neighbouring free space is one block.
            assert not (was_free and block.free)
            was_free = block.free
            end = block.offset + block.size
        assert end == self.PAGES * PAGE

    @invariant()
    def figures_agree(self) -> None:
        used = sum(block.size for block in [*self.leases, *self.idle])
        assert self.table.free_bytes == self.PAGES * PAGE - used
        assert self.table.leased_bytes == sum(block.size for block in self.leases)
        held = {block.offset for block in self.table if not block.free}
        assert held == {block.offset for block in [*self.leases, *self.idle]}

    def _longest_unleased(self) -> int:
        longest = run = 0
        for block in self.table:
            run = 0 if block in self.leases else run + block.size
            longest = max(longest, run)
        return longest


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)


def idle_segments(table: SegmentTable, pages: list[int]) -> list[Block]:
    blocks = []
    for count in pages:
        placement = table.place(count * PAGE)
        assert placement is not None
        blocks.append(placement.block)
    for block in blocks:
        table.release(block)
    return blocks


def test_the_least_recently_used_goes_first() -> None:
    table = SegmentTable(4 * PAGE)
    first, second, *_ = idle_segments(table, [1, 1, 1, 1])
    table.lease(first)
    table.release(first)
    placement = table.place(1)
    assert placement is not None
    assert placement.evicted == [second.offset]


def test_a_large_item_takes_the_stretch_that_was_used_longest_ago() -> None:
    table = SegmentTable(6 * PAGE)
    blocks = idle_segments(table, [1, 1, 1, 1, 1, 1])
    for block in (blocks[0], blocks[4], blocks[5]):
        table.lease(block)
        table.release(block)
    placement = table.place(3 * PAGE)
    assert placement is not None
    assert placement.evicted == [block.offset for block in blocks[1:4]]


def test_leased_segments_are_never_moved_or_evicted() -> None:
    table = SegmentTable(3 * PAGE)
    blocks = idle_segments(table, [1, 1, 1])
    table.lease(blocks[1])
    assert table.place(2 * PAGE) is None
    assert {block.offset for block in table if not block.free} == {0, PAGE, 2 * PAGE}


def test_an_item_larger_than_the_arena() -> None:
    table = SegmentTable(3 * PAGE)
    idle_segments(table, [1, 1, 1])
    assert table.place(3 * PAGE + 1) is None
    assert table.free_bytes == 0, "nothing should have made way in vain"


@pytest.mark.parametrize("seed", range(3))
def test_mixed_sizes_never_fragment_the_arena(seed: int) -> None:
    """Long after it is full, any item of up to a third of the arena finds room, as long as
    leases are few and short."""
    chance = random.Random(seed)
    pages = 300
    table = SegmentTable(pages * PAGE)
    leased: list[Block] = []
    for _ in range(5000):
        size = chance.choice([1, 1, 2, 3, 10, 25, 60, 100])
        placement = table.place(size * PAGE)
        assert placement is not None
        table.release(placement.block)
        if size <= 2 and chance.random() < 0.1:
            table.lease(placement.block)
            leased.append(placement.block)
        if len(leased) > 2:
            table.release(leased.pop(0))
    used = pages * PAGE - table.free_bytes
    assert used > 0.5 * pages * PAGE, "eviction should not empty the arena"

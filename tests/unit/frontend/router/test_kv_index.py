"""The index answers as a naive one does, forgets completely, and does not grow."""

import random
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.identity import BlockHash, Target, WorkerId
from frontend.router.index.kv_index import KvIndex
from frontend.router.index.target_bits import TargetBits
from tests.unit.frontend.router.naive import NaiveIndex, shape


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def chain(*numbers: int) -> list[BlockHash]:
    return [block(number) for number in numbers]


A, B = Target(WorkerId("a"), 0), Target(WorkerId("b"), 0)
A1 = Target(WorkerId("a"), 1)


def test_leading_blocks_count_and_only_those() -> None:
    index = KvIndex()
    index.store(A, chain(1, 2))
    index.store(A, chain(4))
    index.store(B, chain(2, 3))
    index.store(A1, chain(1))
    assert index.match(chain(1, 2, 3, 4)) == {A: 2, A1: 1}
    assert index.match(chain(9, 1)) == {}
    assert index.match([]) == {}


def test_a_block_held_twice_is_gone_after_two_removals() -> None:
    index = KvIndex()
    index.store(A, chain(1, 2))
    index.store(A, chain(2))
    index.remove(A, chain(2))
    assert index.match(chain(1, 2)) == {A: 2}
    index.remove(A, chain(2))
    assert index.match(chain(1, 2)) == {A: 1}


def test_a_block_counts_when_all_groups_of_its_target_hold_it() -> None:
    index = KvIndex()
    index.store(A, chain(1, 2, 3), group=0)
    index.store(B, chain(1, 2, 3), group=0)
    index.store(A, chain(1, 2), group=2)
    assert index.match(chain(1, 2, 3)) == {A: 2, B: 3}
    index.remove(A, chain(1), group=0)
    assert index.match(chain(1, 2, 3)) == {B: 3}


def test_groups_of_a_target_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 groups of each of 1,024 ranks took each request seconds."""
    index, looked, mask = KvIndex(), [], TargetBits.mask
    for rank in range(4):
        for group in range(8):
            index.store(Target(WorkerId("w"), rank), chain(1), group)

    def look(slots: TargetBits, target: Target) -> int:
        looked.append(target)
        return mask(slots, target)

    monkeypatch.setattr(TargetBits, "mask", look)
    assert not index.match(chain(2))
    assert len(looked) == 4


def test_removing_what_is_not_held_changes_nothing() -> None:
    index = KvIndex()
    index.store(A, chain(1))
    index.remove(A, chain(2))
    index.remove(B, chain(1))
    assert index.match(chain(1)) == {A: 1}


def test_clearing_and_storing_again() -> None:
    index = KvIndex()
    index.store(A, chain(1, 2))
    index.clear(A)
    assert index.match(chain(1)) == {}
    index.store(A, chain(2, 3))
    assert index.match(chain(1, 2)) == {}
    assert index.match(chain(2, 3)) == {A: 2}


def test_dropping_a_worker_takes_all_its_ranks() -> None:
    index = KvIndex()
    for target in (A, A1, B):
        index.store(target, chain(1))
    index.drop(A.worker_id)
    assert index.match(chain(1)) == {B: 1}
    assert index._slots.targets() == [B]


def test_a_dropped_worker_leaves_nothing_behind() -> None:
    index = KvIndex()
    index.store(A, [block(number) for number in range(1000)])
    index.store(B, [block(number) for number in range(500, 1500)])
    index.drop(A.worker_id)
    assert index.sweep(100)
    while index.sweep(100):
        pass
    assert shape(index)[:2] == (1000, 1000) and not shape(index).unswept


def test_suspended_blocks_are_kept_but_not_matched() -> None:
    index = KvIndex()
    index.store(A, chain(1))
    index.store(B, chain(1))
    index.suspend(A)
    assert index.match(chain(1, 2)) == {B: 1}
    index.store(A, chain(2))
    assert index.match(chain(1, 2)) == {B: 1}
    index.resume(A)
    assert index.match(chain(1, 2)) == {A: 2, B: 1}


def test_suspending_outlasts_clearing() -> None:
    index = KvIndex()
    index.store(A, chain(1))
    index.suspend(A)
    index.clear(A)
    index.store(A, chain(1))
    assert index.match(chain(1)) == {}
    index.resume(A)
    assert index.match(chain(1)) == {A: 1}


def test_a_second_index_fills_in() -> None:
    slots = TargetBits()
    known, guessed = KvIndex(slots), KvIndex(slots)
    known.store(A, chain(1, 3))
    guessed.store(A, chain(2))
    guessed.store(B, chain(1))
    assert known.match(chain(1, 2, 3, 4), guessed) == {A: 3, B: 1}
    known.suspend(A)
    assert known.match(chain(1, 2, 3), guessed) == {B: 1}
    guessed.store(A, chain(1))
    assert known.match(chain(1, 2, 3), guessed) == {A: 2, B: 1}


def test_clearing_one_index_clears_the_other_over_the_same_slots() -> None:
    slots = TargetBits()
    known, guessed = KvIndex(slots), KvIndex(slots)
    known.store(A, chain(1))
    guessed.store(A, chain(1, 2))
    known.clear(A)
    assert known.match(chain(1, 2), guessed) == {}


def test_slots_are_given_out_again_once_swept() -> None:
    index = KvIndex()
    for number in range(100):
        index.store(A, chain(number, number + 1, number + 2))
        index.clear(A)
    # Storing sweeps twice as much as it stores, so that clearing never outruns it.
    assert len(index._slots) <= 3


TARGETS = [Target(WorkerId(name), rank) for name in "abc" for rank in range(2)]
targets = st.sampled_from(TARGETS)
groups = st.sampled_from([0, 0, 0, 1])


def prefixes(choices: list[int]) -> list[BlockHash]:
    """The blocks of a prompt: each named by all choices up to it, as real hashes are."""
    return [
        BlockHash(bytes([length, *choices[:length]]).ljust(32))
        for length in range(1, len(choices) + 1)
    ]


prompts = st.lists(st.integers(0, 1), max_size=7).map(prefixes)
events = st.tuples(prompts, st.integers(0, 6), st.integers(0, 7))
"""A prompt, and from where to where it is stored or removed."""
mixtures = st.lists(prompts.filter(len).map(lambda prompt: prompt[-1]), max_size=5)
"""Blocks of any prompts."""


class AgainstNaive(RuleBasedStateMachine):
    """Random operations on both; every prompt must match alike."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = KvIndex()
        self.naive = NaiveIndex()

    @rule(where=targets, event=events, group=groups, tell_parent=st.booleans())
    def store(
        self,
        where: Target,
        event: tuple[list[BlockHash], int, int],
        group: int,
        tell_parent: bool,
    ) -> None:
        prompt, start, end = event
        hashes = prompt[start:end]
        parent = prompt[start - 1] if tell_parent and 0 < start <= len(prompt) else None
        self.ours.store(where, hashes, group, parent=parent)
        self.naive.store(where, hashes, group)

    @rule(where=targets, hashes=mixtures, group=groups)
    def store_mixture(self, where: Target, hashes: list[BlockHash], group: int) -> None:
        self.ours.store(where, hashes, group, chained=False)
        self.naive.store(where, hashes, group)

    @rule(where=targets, event=events, group=groups, backwards=st.booleans())
    def remove(
        self,
        where: Target,
        event: tuple[list[BlockHash], int, int],
        group: int,
        backwards: bool,
    ) -> None:
        prompt, start, end = event
        hashes = prompt[start:end][:: -1 if backwards else 1]
        self.ours.remove(where, hashes, group)
        self.naive.remove(where, hashes, group)

    @rule(where=targets, hashes=mixtures, group=groups)
    def remove_mixture(self, where: Target, hashes: list[BlockHash], group: int) -> None:
        self.ours.remove(where, hashes, group)
        self.naive.remove(where, hashes, group)

    @rule(where=targets)
    def clear(self, where: Target) -> None:
        self.ours.clear(where)
        self.naive.clear(where)

    @rule(where=targets)
    def drop(self, where: Target) -> None:
        self.ours.drop(where.worker_id)
        self.naive.drop(where.worker_id)

    @rule(where=targets, suspend=st.booleans())
    def suspend(self, where: Target, suspend: bool) -> None:
        if suspend:
            self.ours.suspend(where)
            self.naive.suspended.add(where)
        else:
            self.ours.resume(where)
            self.naive.suspended.discard(where)

    @rule(limit=st.integers(1, 10))
    def sweep(self, limit: int) -> None:
        self.ours.sweep(limit)

    @rule(hashes=prompts)
    def match(self, hashes: list[BlockHash]) -> None:
        assert self.ours.match(hashes) == self.naive.match(hashes)

    @invariant()
    def a_few_prompts_match_alike(self) -> None:
        for choices in ([0] * 7, [0, 1] * 3):
            self.match_all(prefixes(choices))

    def match_all(self, prompt: list[BlockHash]) -> None:
        """From every block on, so that holes do not hide what is behind them."""
        for start in range(len(prompt)):
            assert self.ours.match(prompt[start:]) == self.naive.match(prompt[start:])


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_no_growth_over_a_long_run() -> None:
    """Soak: a fleet that keeps storing and evicting stays as large as its caches."""
    rng = random.Random(7)
    index = KvIndex()
    held: dict[Target, list[BlockHash]] = {target: [] for target in TARGETS}
    capacity = 400

    def run(steps: int) -> None:
        for _ in range(steps):
            target = rng.choice(TARGETS)
            mine = held[target]
            chance = rng.random()
            if chance < 0.002:
                index.clear(target)
                mine.clear()
            elif chance < 0.003:
                index.drop(target.worker_id)
                for other in TARGETS:
                    if other.worker_id == target.worker_id:
                        held[other].clear()
            fresh = [BlockHash(rng.randbytes(32)) for _ in range(8)]
            index.store(target, fresh)
            mine += fresh
            while len(mine) > capacity:
                index.remove(target, [mine.pop(0)])

    run(3_000)
    tracemalloc.start()
    run(3_000)
    before, _ = tracemalloc.get_traced_memory()
    run(6_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    while index.sweep(1_000):
        pass
    assert shape(index).holdings == sum(map(len, held.values()))
    assert shape(index).blocks == len({one for mine in held.values() for one in mine})
    assert len(index._slots) <= 3 * len(TARGETS)
    assert after < before + 300_000


def test_memory_per_block_is_bounded() -> None:
    """The figure the documentation gives: below 200 bytes for a block on one target."""
    hashes = [BlockHash(random.randbytes(32)) for _ in range(100_000)]
    index = KvIndex()
    tracemalloc.start()
    for start in range(0, len(hashes), 100):
        # A copy of each, as decoding makes them.
        fresh = [BlockHash(bytes(bytearray(one))) for one in hashes[start : start + 100]]
        index.store(TARGETS[start % len(TARGETS)], fresh)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(hashes) < 200


@pytest.mark.parametrize("workers", [1, 70, 300])
def test_many_workers(workers: int) -> None:
    index, whole = KvIndex(), chain(*range(workers))
    for number in range(workers):
        index.store(Target(WorkerId(str(number)), 0), whole[: number + 1])
    depths = index.match(whole)
    assert depths == {Target(WorkerId(str(n)), 0): n + 1 for n in range(workers)}


def test_neighbours_stay_together_whatever_the_size_of_events() -> None:
    index = KvIndex()
    long = chain(*range(600))
    for position in range(len(long)):
        index.store(A, [long[position]], parent=long[position - 1] if position else None)
    assert shape(index).chunks == 3
    index.store(B, long)
    assert shape(index).chunks == 3
    assert index.match(long) == {A: 600, B: 600}


def test_a_hole_in_the_middle_divides_what_stood_together() -> None:
    index = KvIndex()
    index.store(A, chain(*range(10)))
    index.store(B, chain(*range(3, 5)))
    index.remove(A, chain(4, 5, 6))
    assert index.match(chain(*range(10))) == {A: 4}
    assert index.match(chain(3, 4, 5)) == {A: 1, B: 2}
    assert index.match(chain(7, 8, 9)) == {A: 3}
    index.remove(B, chain(4))
    assert index.match(chain(4)) == {}
    index.store(A, chain(4, 5, 6))
    assert index.match(chain(*range(10))) == {A: 10}
    index.clear(A)
    index.drop(B.worker_id)
    while index.sweep(1):
        pass
    assert shape(index)[:3] == (0, 0, 0)


def test_a_lie_about_neighbours_concerns_the_liar_alone() -> None:
    index = KvIndex()
    index.store(A, chain(1, 66, 3))
    index.store(B, chain(1, 2, 3))
    assert index.match(chain(1, 2, 3)) == {A: 1, B: 3}
    index.remove(B, chain(2))
    assert index.match(chain(1, 2, 3)) == {A: 1, B: 1}


def test_blocks_out_of_order_are_matched_one_by_one() -> None:
    index = KvIndex()
    index.store(A, chain(1, 3, 2, 5), chained=False)
    assert shape(index).chunks == 4
    assert index.match(chain(1, 2, 3, 4, 5)) == {A: 3}


def test_an_event_that_names_a_block_twice() -> None:
    index = KvIndex()
    index.store(A, chain(1, 2, 1), chained=False)
    index.remove(A, chain(1))
    assert index.match(chain(1, 2)) == {A: 2}
    index.remove(A, chain(1))
    assert index.match(chain(1, 2)) == {}

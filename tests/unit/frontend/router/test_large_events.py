"""A large event is applied in parts, and comes to the same."""

import hashlib
from collections.abc import Callable, Iterator

import pytest

from common.identity import BlockHash, Target, WorkerId
from frontend.router.event_wire import (
    NOTHING,
    Change,
    Cleared,
    EventBatch,
    MalformedEventError,
    Need,
    Removed,
    Stored,
)
from frontend.router.index import BlockIndexes, TargetBlocks, indexes

TARGET = Target(WorkerId("w0"), 0)
MANY = 1_000
SLICE = 64


def hashes(name: str, count: int = MANY) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(f"{name} {n}".encode()).digest()) for n in range(count)]


def stored(blocks: list[BlockHash], *, chained: bool = True, need: Need = Need.EVERY) -> Stored:
    return Stored(blocks, 16, 0, need, 32, "full_attention", False, None, chained)


def removed(blocks: list[BlockHash]) -> Removed:
    return Removed(blocks, 0, False)


class Blocks:
    """A target's, in indexes of its own."""

    def __init__(self, capacity: int = 0) -> None:
        self.indexes = BlockIndexes.empty()
        self.target = TargetBlocks(TARGET, 16, capacity, self.indexes)

    def matched(self, blocks: list[BlockHash]) -> int:
        return self.indexes.known.match(blocks).get(TARGET, 0)

    def finish(self) -> int:
        """How often there was more to do."""
        times = 0
        while self.target.go_on():
            times += 1
        return times


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "SLICE_BLOCKS", SLICE)


A, B = hashes("a"), hashes("b")


@pytest.mark.parametrize(
    "changes",
    [
        lambda: [stored(list(A))],
        lambda: [stored(list(A), chained=False)],
        lambda: [stored(list(A), need=Need.WINDOW)],
        lambda: [stored(list(A)), stored(list(A)), removed(A[500:]), stored(list(B))],
        lambda: [stored(list(A)), Cleared(), stored(list(B))],
        lambda: [stored([each]) for each in A] + [removed([each]) for each in A[100:]],
    ],
)
def test_it_comes_to_the_same(
    changes: Callable[[], list[Change]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, whole = Blocks(), Blocks()
    parts.target.apply(EventBatch(1.0, changes()))
    assert parts.finish() > MANY // SLICE // 2, "others had their turn"
    monkeypatch.setattr(indexes, "SLICE_BLOCKS", 1 << 30)
    whole.target.apply(EventBatch(1.0, changes()))
    assert not whole.target.go_on()
    assert parts.target.held == whole.target.held > 0
    for blocks in (A, B):
        assert parts.matched(blocks) == whole.matched(blocks)


def test_each_of_many_small_events_counts() -> None:
    """However many say nothing of the target, the event loop is free between them."""
    taken = 0

    def odd() -> Iterator[Change]:
        nonlocal taken
        for _ in range(MANY):
            taken += 1
            yield NOTHING

    blocks = Blocks()
    blocks.target.apply(EventBatch(1.0, [], odd()))
    assert taken <= SLICE // 8
    blocks.finish()
    assert taken == MANY


def test_what_can_not_be_read_far_behind_ends_it() -> None:
    def breaking() -> Iterator[Change]:
        yield stored(list(B))
        raise MalformedEventError("payload", "torn")

    blocks = Blocks()
    blocks.target.apply(EventBatch(1.0, [stored(list(A))], breaking()))
    assert blocks.finish()
    assert "can't be read: malformed KV event (payload): torn" in blocks.target.unusable


def test_what_comes_meanwhile_is_applied_behind_it() -> None:
    blocks = Blocks()
    blocks.target.apply(EventBatch(1.0, [stored(list(A))]))
    assert blocks.target.held < MANY
    blocks.target.apply(EventBatch(2.0, [removed(list(A))]))
    blocks.finish()
    assert blocks.target.held == 0


def test_what_is_forgotten_meanwhile_does_not_come_back() -> None:
    blocks = Blocks()
    blocks.target.apply(EventBatch(1.0, [stored(list(A))]))
    blocks.target.clear()
    assert not blocks.target.go_on()
    assert blocks.target.held == 0


def test_too_many_blocks_are_found_at_the_end() -> None:
    blocks = Blocks(capacity=MANY // 2)
    blocks.target.apply(EventBatch(1.0, [stored(list(A))]))
    assert not blocks.target.unusable
    blocks.finish()
    assert "more blocks than its cache has" in blocks.target.unusable


def test_what_can_not_be_used_ends_it() -> None:
    blocks = Blocks()
    odd = stored(list(B))._replace(block_size=32)
    blocks.target.apply(EventBatch(1.0, [stored(list(A)), odd, stored(hashes("c"))]))
    assert blocks.finish()
    assert "blocks of 32 tokens" in blocks.target.unusable
    assert not blocks.target.go_on()


def test_a_worker_holds_no_more_blocks_than_any_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its card may name any size, and each block takes memory here."""
    monkeypatch.setattr(indexes, "_MAX_BLOCKS", MANY)
    held = Blocks(capacity=1 << 40)
    held.target.apply(EventBatch(0.0, [stored(hashes("all"))]))
    held.finish()
    assert not held.target.unusable
    held.target.apply(EventBatch(0.0, [stored(hashes("more", 1))]))
    assert "more blocks than its cache has" in held.target.unusable

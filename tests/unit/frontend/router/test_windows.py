"""Windowed groups shorten hits as vLLM's own managers do."""

from hypothesis import given
from hypothesis import strategies as st

from common.identity import BlockHash, Target, WorkerId
from frontend.router.index.windows import WindowIndex

A = Target(WorkerId("a"), 0)
HASHES = [BlockHash(bytes([number]) * 32) for number in range(10)]


def held(*groups: tuple[int, list[int]]) -> WindowIndex:
    """An index of groups, each given as needed blocks and positions held."""
    windows = WindowIndex()
    for group, (needed, positions) in enumerate(groups):
        windows.store(A, [HASHES[position] for position in positions], group, needed)
    return windows


def test_the_last_blocks_suffice() -> None:
    assert held((2, [4, 5])).trim(A, HASHES, 6) == 6


def test_a_hit_ends_where_the_window_is_held() -> None:
    assert held((2, [2, 3, 6])).trim(A, HASHES, 8) == 4


def test_a_short_prefix_needs_all_of_itself() -> None:
    assert held((4, [0, 1, 3])).trim(A, HASHES, 8) == 2
    assert held((4, [1, 2])).trim(A, HASHES, 8) == 0


def test_a_state_of_one_block() -> None:
    assert held((1, [3])).trim(A, HASHES, 9) == 4


def test_groups_shorten_each_other_until_they_agree() -> None:
    windows = held((2, [0, 1, 4, 5]), (1, [1, 4]))
    assert windows.trim(A, HASHES, 6) == 2


def test_copies_are_counted() -> None:
    windows = held((1, [0, 0]))
    windows.remove(A, HASHES[:1], 0)
    assert windows.trim(A, HASHES, 1) == 1
    windows.remove(A, HASHES[:1], 0)
    assert windows.trim(A, HASHES, 1) == 0
    windows.remove(A, HASHES[:1], 5)


def test_an_engine_that_drops_the_last_block_needs_one_more() -> None:
    assert held((2, [3, 4, 5])).trim(A, HASHES, 6, peek=1) == 5
    assert held((2, [3, 4, 5])).trim(A, HASHES, 4, peek=1) == 0
    assert held((2, [0, 1])).trim(A, HASHES, 6, peek=1) == 1
    assert held((2, [3, 4, 5])).trim(A, HASHES[:5], 6, peek=1) == 0
    windows = WindowIndex()
    windows.store(A, HASHES[4:5], 0, 1, peeks=False)
    assert windows.trim(A, HASHES, 6, peek=1) == 5


def test_what_is_predicted_counts_beside_what_is_known() -> None:
    known, predicted = held((2, [4])), held((2, [5]))
    assert known.trim(A, HASHES, 8, indexes=[known]) == 0
    assert known.trim(A, HASHES, 8, indexes=[known, predicted]) == 6


def test_what_is_kept_for_later_prompts() -> None:
    windows = held((2, []))
    windows.store(A, [], 1, 1, peeks=False)
    assert windows.tails(A, HASHES, [5], 0) == {0: HASHES[3:5], 1: HASHES[4:5]}
    assert windows.tails(A, HASHES, [5], 1) == {0: HASHES[3:6], 1: HASHES[4:5]}
    assert windows.tails(A, HASHES, [0], 0) == {0: [], 1: []}
    assert windows.tails(A, HASHES, range(1, 5), 0) == {0: HASHES[:4], 1: HASHES[:4]}


def test_forgetting() -> None:
    windows = held((1, [0]), (2, [0, 1]))
    assert windows.holdings(A) == 3
    assert windows.knows(A, 1)
    windows.clear(A)
    assert windows.holdings(A) == 0
    assert windows.targets() == [A]
    windows = held((1, [0]))
    windows.drop(A.worker_id)
    assert not windows.targets()


@given(st.sets(st.integers(0, 9)), st.integers(1, 5), st.integers(0, 10))
def test_one_group_against_the_definition(positions: set[int], needed: int, depth: int) -> None:
    def allowed(length: int) -> bool:
        return all(position in positions for position in range(max(0, length - needed), length))

    longest = max(length for length in range(depth + 1) if allowed(length))
    assert held((needed, sorted(positions))).trim(A, HASHES, depth) == longest

"""Chunks divide into segments and join again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.router.index.chunks import Chunk
from tests.fakes.kv_events import block, blocks


def whole(count: int, mask: int = 0b1) -> Chunk:
    return Chunk(blocks(*range(count)), (count,), (mask,))


def test_a_change_divides_and_its_reverse_joins() -> None:
    chunk = whole(6)
    chunk.change(2, 4, 0b10, held=True)
    assert (chunk.ends, chunk.masks) == ((2, 4, 6), (0b1, 0b11, 0b1))
    assert [chunk.mask_at(position) for position in range(6)] == [1, 1, 3, 3, 1, 1]
    chunk.change(0, 6, 0b10, held=True)
    assert (chunk.ends, chunk.masks) == ((6,), (0b11,))
    chunk.change(0, 6, 0b10, held=False)
    assert (chunk.ends, chunk.masks) == ((6,), (0b1,))


def test_appending_joins_if_the_holders_are_the_same() -> None:
    chunk = whole(2)
    chunk.append(blocks(2, 3), 0b1)
    chunk.append(blocks(4), 0b10)
    assert (chunk.ends, chunk.masks) == ((4, 5), (0b1, 0b10))
    assert chunk.hashes == blocks(0, 1, 2, 3, 4)


def test_finding() -> None:
    chunk = whole(5)
    assert [chunk.find(block(number)) for number in range(5)] == [0, 1, 2, 3, 4]


def test_a_run_ends_at_the_first_difference_and_at_a_segment() -> None:
    chunk = whole(6)
    assert chunk.run(1, blocks(9, 1, 2, 3), 1) == 3
    assert chunk.run(1, blocks(1, 2, 9, 4), 0) == 2
    chunk.change(4, 6, 0b10, held=True)
    assert chunk.run(0, blocks(*range(6)), 0) == 4


@pytest.mark.parametrize("equal", range(9))
@pytest.mark.parametrize("start", [0, 3])
def test_a_chained_run_is_found_wherever_it_ends(equal: int, start: int) -> None:
    chunk = whole(9)
    mine = blocks(*range(start, start + equal), *range(100, 105))
    assert chunk.chained_run(start, mine, 0) == min(equal, 9 - start)
    assert chunk.chained_run(start, [block(77), *mine], 1) == min(equal, 9 - start)


def test_a_run_backwards_ends_at_the_beginning_of_a_segment() -> None:
    chunk = whole(6)
    assert chunk.run_back(5, blocks(5, 4, 3, 9), 0) == 3
    assert chunk.run_back(2, blocks(7, 2, 1, 0, 5), 1) == 3
    chunk.change(0, 4, 0b10, held=True)
    assert chunk.run_back(5, blocks(5, 4, 3), 0) == 2


def test_what_nobody_holds_at_the_end_is_cut_off() -> None:
    chunk = whole(6)
    assert chunk.cut_end() == []
    chunk.change(4, 6, 0b1, held=False)
    assert chunk.cut_end() == blocks(4, 5)
    assert (chunk.ends, chunk.masks) == ((4,), (0b1,))
    chunk.change(0, 4, 0b1, held=False)
    assert chunk.cut_end() == blocks(0, 1, 2, 3)
    assert chunk.hashes == []
    assert chunk.holders() == set()


def test_a_piece_keeps_its_holders() -> None:
    chunk = whole(6)
    chunk.change(2, 4, 0b10, held=True)
    piece = chunk.cut(1, 3)
    assert piece.hashes == blocks(1, 2)
    assert (piece.ends, piece.masks) == ((1, 2), (0b1, 0b11))


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 2), st.booleans()),
        max_size=12,
    )
)
def test_segments_say_what_single_blocks_would(
    changes: list[tuple[int, int, int, bool]],
) -> None:
    chunk, naive = whole(8), [0b1] * 8
    for start, end, slot, held in changes:
        chunk.change(start, end, 1 << slot, held=held)
        for position in range(start, end):
            naive[position] = (
                naive[position] | 1 << slot if held else naive[position] & ~(1 << slot)
            )
    assert [chunk.mask_at(position) for position in range(8)] == naive
    assert chunk.ends[-1] == 8
    assert all(one != other for one, other in zip(chunk.masks, chunk.masks[1:], strict=False))

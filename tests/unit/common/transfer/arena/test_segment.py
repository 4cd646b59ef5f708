import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptSegmentError, StaleSegmentError
from common.identity import MmHash
from common.transfer.arena.layout import (
    HEADER_SIZE,
    PART_ALIGNMENT,
    SegmentLayout,
    check_envelope,
    check_header,
    live_header,
    reclaimed_header,
    write_parts,
)

KEY = bytes(range(32))
HASH = MmHash("ab" * 32)
LAYOUT = SegmentLayout(5, (64, 1, 0, 130))
ENVELOPE = b"12345"


@given(st.integers(0, 300), st.lists(st.integers(0, 300), max_size=6))
def test_parts_are_aligned_and_apart(envelope: int, sizes: list[int]) -> None:
    layout = SegmentLayout(envelope, tuple(sizes))
    parts = [bytes([i + 1]) * size for i, size in enumerate([envelope, *sizes])]
    memory = bytearray(layout.length + 1)
    write_parts(memoryview(memory), layout, parts)
    found_envelope, found = layout.split(memoryview(memory))
    assert [bytes(found_envelope), *map(bytes, found)] == parts
    assert all(offset % PART_ALIGNMENT == 0 for offset in layout.buffer_offsets)
    assert not any(memory[:HEADER_SIZE]), "the header is written last, by somebody else"
    assert memory[-1] == 0
    assert layout.nbytes == envelope + sum(sizes)


def header(generation: int = 7, key: bytes = KEY) -> bytes:
    made = live_header(key, generation, HASH, LAYOUT, ENVELOPE)
    assert len(made) == HEADER_SIZE
    return made


def test_its_own_header_is_accepted() -> None:
    crc = check_header(header(), KEY, 7, HASH, LAYOUT)
    check_envelope(ENVELOPE, crc, HASH)
    with pytest.raises(CorruptSegmentError, match="envelope"):
        check_envelope(b"12346", crc, HASH)


@pytest.mark.parametrize(
    "stale", [header(8), reclaimed_header(KEY, 7), reclaimed_header(KEY, 9), bytes(HEADER_SIZE)]
)
def test_another_generation_is_stale(stale: bytes) -> None:
    with pytest.raises(StaleSegmentError, match=HASH):
        check_header(stale, KEY, 7, HASH, LAYOUT)


@pytest.mark.parametrize(
    ("mm_hash", "layout"),
    [
        (MmHash("cd" * 32), LAYOUT),
        (HASH, SegmentLayout(5, (64, 1, 0, 131))),
        (HASH, SegmentLayout(4, (64, 1, 0, 130))),
    ],
)
def test_another_item_or_size_is_corrupt(mm_hash: MmHash, layout: SegmentLayout) -> None:
    with pytest.raises(CorruptSegmentError):
        check_header(header(), KEY, 7, mm_hash, layout)


def test_a_header_made_without_the_key_is_refused() -> None:
    """Pixels may hold anything, a header's imitation too."""
    with pytest.raises(CorruptSegmentError, match="damaged"):
        check_header(header(key=bytes(32)), KEY, 7, HASH, LAYOUT)


@given(st.integers(0, HEADER_SIZE - 1), st.integers(1, 255))
def test_any_damaged_byte_is_noticed(at: int, change: int) -> None:
    damaged = bytearray(header())
    damaged[at] ^= change
    with pytest.raises((StaleSegmentError, CorruptSegmentError)):
        check_header(bytes(damaged), KEY, 7, HASH, LAYOUT)

"""Our CBOR is byte for byte that of ``cbor2``."""

import itertools

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.router.hashing import cbor

BORDERS = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1]


def canonical(value: object) -> bytes:
    return bytes(cbor2.dumps(value, canonical=True))


@pytest.mark.parametrize("value", [*BORDERS, *(-1 - border for border in BORDERS)])
def test_integers_at_the_borders_of_each_form(value: int) -> None:
    assert cbor.integer(value) == canonical(value)


@given(st.integers(-(2**64), 2**64 - 1))
def test_integers(value: int) -> None:
    assert cbor.integer(value) == canonical(value)


@given(st.text(max_size=300))
def test_text(value: str) -> None:
    assert cbor.text(value) == canonical(value)


@given(st.binary(max_size=300))
def test_byte_strings(value: bytes) -> None:
    assert cbor.byte_string(value) == canonical(value)


def test_null() -> None:
    assert canonical(None) == cbor.NULL


ids = st.one_of(
    st.integers(0, 200_000),
    st.sampled_from(BORDERS[:-3]),
    st.integers(0, 2**32 - 1),
)


@given(st.lists(ids, max_size=120), st.integers(1, 40), st.binary(max_size=3))
def test_arrays_of_unsigned_integers(values: list[int], run: int, suffix: bytes) -> None:
    data, ends = cbor.unsigned_arrays(values, run, suffix)
    assert len(ends) == len(values) // run + 1
    arrays = [data[start:end] for start, end in itertools.pairwise(ends)]
    assert arrays == [
        canonical(values[start : start + run]) + suffix
        for start in range(0, len(values) - run + 1, run)
    ]


@pytest.mark.parametrize("values", [[-1, 2], [2**32, 2]])
def test_integers_out_of_range_are_refused(values: list[int]) -> None:
    with pytest.raises(OverflowError):
        cbor.unsigned_arrays(values, 2)


def test_text_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        cbor.text("\ud800")

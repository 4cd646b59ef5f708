"""What errors say of where they came from."""

import itertools

from common.errors import causes


def test_causes_end_even_if_an_error_is_its_own() -> None:
    first, second = ValueError("first"), KeyError("second")
    second.__cause__ = first
    assert list(itertools.islice(causes(second), 9)) == [second, first]
    first.__cause__ = second
    assert list(itertools.islice(causes(second), 9)) == [second, first]
    first.__cause__ = first
    assert list(itertools.islice(causes(first), 9)) == [first]

"""What errors say of where they came from."""

import itertools

from common.errors import OutOfFilesError, causes


def test_causes_end_even_if_an_error_is_its_own() -> None:
    first, second = ValueError("first"), KeyError("second")
    second.__cause__ = first
    assert list(itertools.islice(causes(second), 9)) == [second, first]
    first.__cause__ = second
    assert list(itertools.islice(causes(second), 9)) == [second, first]
    first.__cause__ = first
    assert list(itertools.islice(causes(first), 9)) == [first]


def test_no_text_of_an_error_is_made() -> None:
    """FastAPI's has all that a client sent in it, for each error."""

    class Silent(ValueError):
        def __str__(self) -> str:
            raise AssertionError("its text was made")

    assert not OutOfFilesError.caused(Silent("x"))
    assert OutOfFilesError.caused(RuntimeError("can't start new thread"))

"""For all tests of the frontend."""

from collections.abc import Iterator

import pytest

from tests.unit.frontend.http.asking import working_on


@pytest.fixture(autouse=True)
def no_request() -> Iterator[None]:
    """A test that is no coroutine would leave its request to all that follow."""
    with working_on(None):
        yield

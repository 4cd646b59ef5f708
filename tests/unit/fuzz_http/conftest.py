"""Canaries to be planted."""

from collections.abc import Iterator

import pytest

from tests.fuzz_http.canaries import Canaries


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canaries]:
    made = Canaries(tmp_path_factory.mktemp("canaries"))
    yield made
    made.close()

"""Spies in all that is forked here, from one process that has imported vLLM with them."""

from collections.abc import Iterator

import pytest

from tests.e2e.processes import forks_with
from tests.fuzz_http.canaries import Canaries


@pytest.fixture(scope="package")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canaries]:
    """What nothing may touch; each module reads what was touched since the last look."""
    canaries = Canaries(tmp_path_factory.mktemp("canaries") / "sown")
    with forks_with(canaries.environment):
        try:
            yield canaries
        finally:
            canaries.close()

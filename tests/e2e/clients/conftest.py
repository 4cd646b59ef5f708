"""What clients are given: the frontend and the plain vLLM that all end-to-end tests share."""

import pytest

from tests.e2e.clients.programs.outcomes import Endpoint
from tests.e2e.conftest import Stack
from tests.pictures import data_uri, picture


@pytest.fixture(scope="session")
def ours(stack: Stack, pictures_url: str) -> Endpoint:
    """The frontend."""
    return Endpoint(stack.frontend.url, "demo", data_uri(picture("clients")), pictures_url)


@pytest.fixture(scope="session")
def theirs(stack: Stack, pictures_url: str) -> Endpoint:
    """The plain vLLM."""
    return Endpoint(stack.plain.url, "demo", data_uri(picture("clients")), pictures_url)

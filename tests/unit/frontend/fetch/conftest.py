"""A small internet: names, public and private addresses, and a fetcher in front of it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import TypeAlias

import pytest
import uvloop

from common.media.decoder_guard import guard_decoders
from frontend.fetch.http import HttpFetcher
from frontend.fetch.loader import MediaLoader
from frontend.media_limits import addresses, policy
from frontend.media_limits.addresses import Address
from frontend.media_limits.policy import FetchPolicy
from tests.unit.frontend.fetch.sites import OTHER_PUBLIC, PRIVATE, PUBLIC, Site, serving

guard_decoders()  # as each frontend does; a module that is run alone would else have plain ones


class Names:
    """A name server. Several answers to one name are given in turn."""

    def __init__(self) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []

    def __setitem__(self, name: str, answers: list[list[str]]) -> None:
        self.answers[name] = answers

    def lookup(self, host: str) -> list[str]:
        self.asked.append(host)
        answers = self.answers.get(host.removesuffix("."))
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return answers.pop(0) if len(answers) > 1 else answers[0]


MakeFetcher: TypeAlias = Callable[..., HttpFetcher]
MakeLoader: TypeAlias = Callable[..., MediaLoader]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The frontend's, which raises errors of its own."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take 127.0.1.* for public addresses of other machines."""

    def is_public(address: Address) -> bool:
        return str(address).startswith("127.0.1.") or addresses.is_public(address)

    monkeypatch.setattr(policy, "is_public", is_public)
    monkeypatch.setattr(policy, "is_own", lambda _: False)


@pytest.fixture
def names() -> Names:
    found = Names()
    found["site.example"] = [[PUBLIC]]
    found["other.example"] = [[OTHER_PUBLIC]]
    found["internal.example"] = [[PRIVATE]]
    return found


@pytest.fixture
async def site(internet: None, twin: socket.socket) -> AsyncIterator[Site]:
    """A server with a public address."""
    async with serving(Site(PUBLIC, twin.getsockname()[1])) as running:
        yield running


@pytest.fixture
async def internal(twin: socket.socket) -> AsyncIterator[Site]:
    """A server on the same port that nobody may reach."""
    async with serving(Site(PRIVATE), sock=twin) as running:
        yield running
        assert running.connections == 0


@pytest.fixture
def twin() -> Iterator[socket.socket]:
    """A private address with a port that is free on the public one too."""
    while True:
        private = socket.create_server((PRIVATE, 0))
        with contextlib.suppress(OSError):
            socket.create_server((PUBLIC, private.getsockname()[1])).close()
            break
        private.close()
    yield private
    private.close()


@pytest.fixture
async def make_fetcher(names: Names, site: Site) -> AsyncIterator[MakeFetcher]:
    """Fetchers that leave nothing behind."""
    before = asyncio.all_tasks()
    made: list[HttpFetcher] = []

    def make(**limits: object) -> HttpFetcher:
        tls = limits.pop("tls", None)
        made.append(
            HttpFetcher(FetchPolicy.model_validate(limits), lookup=names.lookup, tls=tls)  # type: ignore[arg-type]
        )
        return made[-1]

    yield make
    for fetcher in made:
        await fetcher.close()
    await site.closed()
    await asyncio.sleep(0)
    this = asyncio.current_task()
    assert {task for task in asyncio.all_tasks() - before if task is not this} == set()


@pytest.fixture
async def make_loader(make_fetcher: MakeFetcher) -> AsyncIterator[MakeLoader]:
    """Loaders whose fetchers see the small internet."""
    async with AsyncExitStack() as made:

        def make(cache_bytes: int = 1 << 24, **limits: object) -> MediaLoader:
            fetcher = make_fetcher(**limits)
            loader = MediaLoader(fetcher._policy, cache_bytes, http=fetcher)
            made.push_async_callback(loader.close)
            return loader

        yield make

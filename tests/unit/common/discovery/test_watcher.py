"""What a place may list, whatever it is: the watcher's own limits, over a place in memory."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import pytest

from common.discovery import watcher
from common.discovery.base import MAX_PROBLEMS, CardPresent, RenewedPublisher
from common.discovery.watcher import Entry, Odd, Place, PollingWatcher
from common.errors import DiscoveryError
from common.identity import Incarnation, WorkerId
from common.request_plane.card import WorkerCard
from tests.fakes.cards import make_card
from tests.waiting import until


class Listed(Place):
    """Lists what it is told to, and counts what is read."""

    def __init__(self, pages: Iterable[Iterable[Entry]]) -> None:
        self.poll_s = 0.01
        self._pages = pages
        self.read_names: list[str] = []

    async def pages(self) -> AsyncGenerator[Iterable[Entry], None]:
        for page in self._pages:
            await asyncio.sleep(0)
            yield page

    async def read(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        self.read_names += [entry.name for entry in entries]
        return [entry._replace(content=make_card(entry.name).to_json()) for entry in entries]


def entry(name: str) -> Entry:
    return Entry(name, 0, (WorkerId(name), Incarnation("i0")))


ODD = Odd("name", "it is odd")


async def test_a_long_page_leaves_turns_to_others() -> None:
    place = Listed([[Entry(f"odd{number}", 0, ODD) for number in range(5_000)]])
    looking = asyncio.create_task(PollingWatcher(place, None)._look())
    turns = 0
    while not looking.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 5_000 // watcher._LISTED_AT_ONCE


async def test_each_card_leaves_a_turn_to_others() -> None:
    looking = asyncio.create_task(
        PollingWatcher(Listed([map(entry, map(str, range(40)))]), None)._look()
    )
    turns = 0
    while not looking.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 40


async def test_no_more_is_read_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "MAX_CARDS", 20)
    place = Listed([map(entry, map(str, range(1_000)))])
    await PollingWatcher(place, None)._look()
    assert len(place.read_names) < 20 + watcher.READ_AT_ONCE


@pytest.mark.parametrize("page", [[entry("w0")], []], ids=["the same page", "empty pages"])
async def test_a_list_without_an_end_is_given_up(
    page: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "MAX_LISTED", 1_000)
    endless = PollingWatcher(Listed(iter(lambda: page, None)), None)
    with pytest.raises(DiscoveryError, match="lists more than 1000 entries"):
        await endless._look()


async def test_cards_before_the_end_of_an_endless_list_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "MAX_LISTED", 1_000)
    endless = [False]

    def pages() -> Iterable[list[Entry]]:
        yield [entry("w0"), *([entry("w1")] if endless[0] else [])]
        while endless[0]:
            yield []

    class Changing(Listed):
        async def pages(self) -> AsyncGenerator[Iterable[Entry], None]:
            for page in pages():
                yield page

    changes = PollingWatcher(Changing([]), None).changes()
    async with aclosing(changes):  # type: ignore[type-var]  # a generator in fact
        assert await anext(changes) == CardPresent(make_card("w0"))
        endless[0] = True
        assert await anext(changes) == CardPresent(make_card("w1"))


async def test_long_names_are_remembered_in_part() -> None:
    seen = PollingWatcher(Listed([[Entry("x" * 1_000_000, 0, ODD)]]), None)
    await seen._look()
    assert [len(name) for name in seen._odd] == [watcher.MAX_ODD_NAME]


async def test_problems_that_are_never_the_same_are_remembered_up_to_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = PollingWatcher(Listed([]), None)
    for number in range(3 * MAX_PROBLEMS):
        seen._note_problem(DiscoveryError(f"at {number}"))
    assert len(seen._problems) == len(caplog.records) == MAX_PROBLEMS


async def test_a_renewal_that_never_fails_the_same_way_is_logged_up_to_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(RenewedPublisher):
        tries = 0

        async def check(self, worker_id: WorkerId, incarnation: Incarnation) -> None: ...

        async def publish(self, card: WorkerCard) -> None: ...

        async def _remove(self) -> None: ...

        async def _renew(self) -> None:
            self.tries += 1
            raise DiscoveryError(f"at {self.tries}")

    failing = Failing(None, 0.0)
    failing.keep_renewed()
    await until(lambda: failing.tries > 2 * MAX_PROBLEMS)
    await failing.withdraw()
    assert len(caplog.records) == MAX_PROBLEMS

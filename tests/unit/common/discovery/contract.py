"""What every kind of discovery must do, whatever it keeps cards in."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from common.discovery.base import (
    CardChange,
    CardGone,
    CardPresent,
    CardPublisher,
    CardRefused,
    CardWatcher,
    Discovery,
)
from common.errors import CardKeyError
from common.fleet_key import FleetKey, new
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import WorkerCard, WorkerState
from tests.fakes.cards import make_card
from tests.waiting import until

RENEW_S = 0.02
"""Between renewals of a lease."""


class Changes:
    """The changes of a watcher, one at a time."""

    def __init__(self, changes: AsyncIterator[CardChange]) -> None:
        self._changes = changes

    async def next(self) -> CardChange:
        async with asyncio.timeout(60):
            return await anext(self._changes)


@asynccontextmanager
async def watching(watcher: CardWatcher) -> AsyncIterator[Changes]:
    changes = watcher.changes()
    async with aclosing(changes):  # type: ignore[type-var]  # a generator in fact
        yield Changes(changes)


@asynccontextmanager
async def published(discovery: Discovery) -> AsyncIterator[tuple[CardPublisher, Changes]]:
    """A card and somebody who has seen it."""
    async with (
        discovery.publisher(renew_s=RENEW_S) as publisher,
        watching(discovery.watcher()) as changes,
    ):
        await publisher.publish(make_card())
        assert await changes.next() == CardPresent(make_card())
        yield publisher, changes


def counted(reason: str) -> float:
    """How often discovery went wrong for a reason."""
    return float(DISCOVERY_ERRORS.labels(reason)._value.get())


def gone(card: WorkerCard) -> CardGone:
    return CardGone(card.worker_id, card.incarnation)


class DiscoveryContract(ABC):
    """Tests that need nothing but the interface, and somebody who takes cards away."""

    @abstractmethod
    def publisher(self, key: FleetKey | None = None) -> CardPublisher:
        """One that renews its lease many times a second."""

    @abstractmethod
    def watcher(self, key: FleetKey | None = None) -> CardWatcher:
        """Of the same place."""

    @abstractmethod
    async def lose_all_cards(self) -> None:
        """Take the place itself away, behind everybody's back."""

    @abstractmethod
    async def abandon(self, publisher: CardPublisher) -> None:
        """Let a publisher end as if its process was killed."""

    async def test_who_only_checks_publishes_nothing(self) -> None:
        card = make_card()
        async with watching(self.watcher()) as changes:
            async with self.publisher() as publisher:
                await publisher.check(WorkerId("w9"), card.incarnation)
                await publisher.publish(card)
                await publisher.check(card.worker_id, card.incarnation)
                assert await changes.next() == CardPresent(card)
            assert await changes.next() == gone(card)

    async def test_a_published_card_is_seen_and_a_withdrawn_one_goes(self) -> None:
        card = make_card()
        async with watching(self.watcher()) as changes:
            async with self.publisher() as publisher:
                await publisher.publish(card)
                assert await changes.next() == CardPresent(card)
            assert await changes.next() == gone(card)

    async def test_whoever_comes_later_sees_what_is_there(self) -> None:
        async with self.publisher() as publisher:
            await publisher.publish(make_card())
            for _ in range(2):
                async with watching(self.watcher()) as changes:
                    assert await changes.next() == CardPresent(make_card())

    async def test_a_changed_card_is_seen_again(self) -> None:
        async with watching(self.watcher()) as changes, self.publisher() as publisher:
            for state in WorkerState:
                card = make_card(state=state)
                await publisher.publish(card)
                assert await changes.next() == CardPresent(card)

    async def test_iterating_again_goes_on_after_the_last_change(self) -> None:
        watcher = self.watcher()
        async with self.publisher() as publisher:
            await publisher.publish(make_card())
            async with watching(watcher) as changes:
                assert await changes.next() == CardPresent(make_card())
        async with watching(watcher) as changes:
            assert await changes.next() == gone(make_card())

    @pytest.mark.parametrize("sealed", [False, True])
    async def test_a_card_of_another_fleet_is_refused(self, sealed: bool, tmp_path: Path) -> None:
        for name in ("ours", "theirs"):
            new(tmp_path / name)
        ours, theirs = FleetKey.read(tmp_path / "ours"), FleetKey.read(tmp_path / "theirs")
        async with watching(self.watcher(ours)) as changes:
            async with self.publisher(theirs if sealed else None) as stranger:
                await stranger.publish(make_card())
                refused = await changes.next()
                assert isinstance(refused, CardRefused)
                assert isinstance(refused.error, CardKeyError)
            assert await changes.next() == gone(make_card())
            async with self.publisher(ours) as publisher:
                card = make_card(fleet_key=ours.fingerprint)
                await publisher.publish(card)
                assert await changes.next() == CardPresent(card)

    async def test_a_leaving_worker_takes_nothing_of_its_successor(self) -> None:
        old, new = make_card(), make_card(incarnation=Incarnation("i1"))
        async with watching(self.watcher()) as changes, self.publisher() as successor:
            async with self.publisher() as publisher:
                await publisher.publish(old)
                assert await changes.next() == CardPresent(old)
                await successor.publish(new)
                assert await changes.next() == CardPresent(new)
                draining = old.model_copy(update={"state": WorkerState.DRAINING})
                await publisher.publish(draining)
                assert await changes.next() == CardPresent(draining)
            assert await changes.next() == gone(old)
            async with watching(self.watcher()) as later:
                assert await later.next() == CardPresent(new)

    async def test_a_lost_card_is_published_again(self) -> None:
        async with watching(self.watcher()) as changes, self.publisher() as publisher:
            await publisher.publish(make_card())
            assert await changes.next() == CardPresent(make_card())
            await self.lose_all_cards()
            # Whether its absence is noticed is a matter of time; at the end it is there.
            async with watching(self.watcher()) as later:
                assert await later.next() == CardPresent(make_card())

    async def test_a_worker_that_dies_goes_when_its_lease_ends_and_no_other(self) -> None:
        dead, alive = make_card("dead"), make_card("alive")
        async with watching(self.watcher()) as changes, self.publisher() as survivor:
            publisher = self.publisher()
            for one, card in ((publisher, dead), (survivor, alive)):
                await one.publish(card)
                assert await changes.next() == CardPresent(card)
            await self.abandon(publisher)
            assert await changes.next() == gone(dead)
            async with self.publisher() as again:  # a new process of the same worker
                reborn = make_card("dead", incarnation=Incarnation("i1"))
                await again.publish(reborn)
                assert await changes.next() == CardPresent(reborn)
            assert await changes.next() == gone(reborn)

    async def test_what_was_withdrawn_never_comes_back(self) -> None:
        """Not even by a write that was given up while it was under way."""
        for _ in range(20):
            async with self.publisher() as publisher:
                await publisher.publish(make_card())
                publishing = asyncio.create_task(
                    publisher.publish(make_card(state=WorkerState.DRAINING))
                )
                await asyncio.sleep(0)
                publishing.cancel()
                await asyncio.gather(publishing, return_exceptions=True)
        other = make_card("w1")
        async with self.publisher() as publisher:
            await publisher.publish(other)
            async with watching(self.watcher()) as changes:
                assert await changes.next() == CardPresent(other)

    async def test_who_withdraws_while_it_publishes_leaves_nothing(self) -> None:
        before = asyncio.all_tasks()
        for _ in range(20):
            publisher = self.publisher()
            publishing = asyncio.create_task(publisher.publish(make_card()))
            await asyncio.sleep(0)
            await publisher.withdraw()
            await publishing
        await until(lambda: asyncio.all_tasks() == before)
        other = make_card("w1")
        async with self.publisher() as publisher:
            await publisher.publish(other)
            async with watching(self.watcher()) as changes:
                assert await changes.next() == CardPresent(other)

    async def test_workers_are_told_apart(self) -> None:
        cards = {WorkerId(f"w{number}"): make_card(f"w{number}") for number in range(3)}
        publishers = [self.publisher() for _ in cards]
        async with watching(self.watcher()) as changes:
            for publisher, card in zip(publishers, cards.values(), strict=True):
                await publisher.publish(card)
            seen = [await changes.next() for _ in cards]
            assert {
                change.card.worker_id for change in seen if isinstance(change, CardPresent)
            } == set(cards)
            await publishers[1].withdraw()
            assert await changes.next() == gone(cards[WorkerId("w1")])
            for publisher in publishers:
                await publisher.withdraw()

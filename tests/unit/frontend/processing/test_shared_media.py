"""A medium that several processes are shown at the same time is processed by one of them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from common.lru import Lru
from common.transfer.arena.arena import Arena
from common.transfer.shared_arena import ArenaKeeper, SharedArena
from frontend.processing.batch import Batch, Processed
from frontend.processing.processed_once import Flights
from frontend.processing.store import ArenaStore
from tests.unit.frontend.processing.media import batch_of, broken_image, made_up
from tests.waiting import until


class Frontend:
    """One process's flights, over its own backend and the arena of all."""

    width = 1

    def __init__(self, arena: SharedArena) -> None:
        self.arena = arena
        self.store = ArenaStore(arena)
        self.open = asyncio.Event()
        self.began: list[str] = []
        self.error: Exception | None = None
        self.flights = Flights(self, Lru(9), self.store)

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        names = [medium.content.data.decode() for medium in batch.media]
        self.began += names
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [await asyncio.to_thread(self.store.put, made_up(name)) for name in names]

    async def show(self, *names: str) -> list[Processed]:
        with self.flights.board(names) as seats:
            if seats.fresh:
                batch = batch_of(*(broken_image(str(name).encode()) for name in seats.fresh))
                self.flights.begin(batch, seats.fresh, asyncio.Semaphore(9))
            return [await seats.landed(name) for name in names]


Two = tuple[Frontend, Frontend]


@pytest.fixture
async def two(arena: Arena) -> AsyncIterator[Two]:
    keeper = ArenaKeeper(arena, quarantine_s=0.0)
    made = []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        await keeper.attach(ours)
        made.append(Frontend(SharedArena(arena.offer, theirs, processes=2)))
    yield made[0], made[1]
    for each in made:
        await each.flights.close()
        await asyncio.to_thread(each.arena.close)


async def test_it_is_processed_by_one(two: Two) -> None:
    one, other = two
    first = asyncio.create_task(one.show("a", "b"))
    await until(lambda: one.began)
    second = asyncio.create_task(other.show("b", "c", "a"))
    one.open.set()
    other.open.set()
    assert [each.mm_hash for each in await first] == ["a", "b"]
    assert [each.mm_hash for each in await second] == ["b", "c", "a"]
    assert (one.began, other.began) == (["a", "b"], ["c"])
    assert [each.mm_hash for each in await other.show("b")] == ["b"]
    assert other.began == ["c"]


async def test_both_show_the_same_in_another_order(two: Two) -> None:
    """None of them waits for the other, which waits for it."""
    one, other = two
    for each in two:
        each.open.set()
    names = [f"n{number}" for number in range(20)]
    shown = await asyncio.gather(one.show(*names), other.show(*reversed(names)))
    assert [each.mm_hash for each in shown[0]] == names
    assert [each.mm_hash for each in shown[1]] == names[::-1]
    assert sorted(one.began + other.began) == sorted(names)


async def test_what_one_fails_at_the_other_tries(two: Two) -> None:
    one, other = two
    one.error = ValueError("no picture")
    first = asyncio.create_task(one.show("a"))
    await until(lambda: one.began)
    second = asyncio.create_task(other.show("a"))
    other.open.set()
    one.open.set()
    with pytest.raises(ValueError, match="no picture"):
        await first
    assert [each.mm_hash for each in await second] == ["a"]


async def test_what_is_like_nothing_else_is_not_asked_for(two: Two) -> None:
    one, _ = two
    shared = one.store.directory
    assert shared is not None
    key = object()
    assert await shared.claim(key) is None
    assert await shared.claim(key) is None
    shared.landed(key, None)

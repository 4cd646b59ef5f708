"""What leaves the ground lands, whatever becomes of it and of those who wait."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Hashable

import pytest
import pytest_asyncio
from vllm.exceptions import VLLMValidationError

from common.errors import OverloadedError
from common.identity import MmHash
from common.lru import Lru
from frontend.processing.batch import Batch, Processed
from frontend.processing.errors import AbandonedError
from frontend.processing.processed_once import Flights, Seats
from frontend.processing.store import PrivateStore
from tests.unit.frontend.processing.media import batch_of, broken_image, made_up
from tests.waiting import until


class Backend:
    """Begins what somebody wants when its door opens."""

    width = 1

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.batches: list[str] = []
        self.left_undone = 0
        self.when_abandoned: Callable[[], None] = lambda: None
        self.fails: Callable[[str], Exception | None] = lambda _: None

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        names = [medium.content.data.decode() for medium in batch.media]
        self.batches.append(" ".join(names))
        await self.open.wait()
        if abandoned():
            self.left_undone += 1
            self.when_abandoned()
            raise AbandonedError("nobody waits for it")
        if error := self.fails(self.batches[-1]):
            raise error
        return [made_up(name) for name in names]


class Airport:
    def __init__(self) -> None:
        self.backend = Backend()
        self.hashes = Lru[Hashable, MmHash](9)
        self.flights = Flights(self.backend, self.hashes, PrivateStore(0.0))

    async def passenger(self, *names: str) -> list[str]:
        """A request; the hashes that its media have are their names."""
        with self.flights.board(names) as seats:
            if seats.fresh:
                batch = batch_of(*(broken_image(str(name).encode()) for name in seats.fresh))
                self.flights.begin(batch, seats.fresh, asyncio.Semaphore(9))
            return [(await seats.landed(name)).mm_hash for name in names]

    async def waiting(self, *names: str) -> asyncio.Task[list[str]]:
        """A passenger who has boarded."""
        task = asyncio.create_task(self.passenger(*names))
        await asyncio.sleep(0)
        return task


@pytest_asyncio.fixture
async def airport() -> AsyncIterator[Airport]:
    airport = Airport()
    yield airport
    await airport.flights.close()


async def leave(task: asyncio.Task[list[str]]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_batch_lands_for_all_who_want_a_part_of_it(airport: Airport) -> None:
    first, second = await airport.waiting("a", "b"), await airport.waiting("b", "c")
    airport.backend.open.set()
    assert await first == ["a", "b"]
    assert await second == ["b", "c"]
    assert airport.backend.batches == ["a b", "c"]
    assert [airport.hashes.get(name) for name in "abc"] == ["a", "b", "c"]


async def test_what_has_landed_is_not_in_flight(airport: Airport) -> None:
    airport.backend.open.set()
    for _ in range(2):
        await airport.passenger("a")
    assert airport.backend.batches == ["a", "a"]


async def test_a_batch_that_fails_is_tried_medium_by_medium(airport: Airport) -> None:
    airport.backend.fails = lambda names: ValueError(names) if "bad" in names else None
    both, other = await airport.waiting("good", "bad"), await airport.waiting("good")
    airport.backend.open.set()
    with pytest.raises(ValueError, match=r"^bad$"):
        await both
    assert await other == ["good"]
    assert airport.backend.batches == ["good bad", "good", "bad"]
    assert airport.hashes.get("bad") is None


@pytest.mark.parametrize("kind", [ValueError, VLLMValidationError])
async def test_what_users_are_told_is_no_mistake_of_ours(
    airport: Airport, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    airport.backend.open.set()
    airport.backend.fails = lambda _: kind("too large")
    with pytest.raises(kind):
        await airport.passenger("a")
    assert not caplog.records


async def test_a_lack_of_room_concerns_all_of_a_batch(airport: Airport) -> None:
    airport.backend.open.set()
    airport.backend.fails = lambda _: OverloadedError("try again later")
    with pytest.raises(OverloadedError):
        await airport.passenger("a", "b")
    assert airport.backend.batches == ["a b"]


async def test_who_comes_before_the_turn_of_what_was_left_has_it(airport: Airport) -> None:
    await leave(await airport.waiting("a"))
    late = await airport.waiting("a")
    airport.backend.open.set()
    assert await late == ["a"]
    assert airport.backend.batches == ["a"]


async def test_what_nobody_wants_is_left_undone_and_can_be_asked_for_anew(
    airport: Airport,
) -> None:
    await leave(await airport.waiting("a"))
    airport.backend.open.set()
    await until(lambda: airport.backend.left_undone)
    assert await airport.passenger("a") == ["a"]
    assert airport.backend.batches == ["a", "a"]


class Decoded:
    """A medium of a batch."""


async def test_what_was_decoded_for_nobody_is_let_go_at_once(
    airport: Airport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its megapixels count until it is, and garbage may be collected minutes later."""
    kept: list[weakref.ref[Decoded]] = []
    run = airport.backend.run

    async def decode_and_run(batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        decoded = Decoded()
        kept.append(weakref.ref(decoded))
        processed = await run(batch, abandoned)
        del decoded
        return processed

    monkeypatch.setattr(airport.backend, "run", decode_and_run)
    gc.disable()
    try:
        await leave(await airport.waiting("a"))
        airport.backend.open.set()
        await until(lambda: airport.backend.left_undone)
        await until(lambda: not airport.flights._flights)
        await until(lambda: kept[0]() is None)
    finally:
        gc.enable()


async def test_who_comes_while_it_is_being_given_up_has_it_too(airport: Airport) -> None:
    late: list[Seats] = []
    airport.backend.when_abandoned = lambda: late.append(airport.flights.board(["a"]))
    await leave(await airport.waiting("a"))
    airport.backend.open.set()
    await until(lambda: late)
    with late[0] as seats:
        assert not seats.fresh
        assert (await seats.landed("a")).mm_hash == "a"
    assert airport.backend.batches == ["a", "a"]


async def test_a_batch_goes_on_without_those_who_left(airport: Airport) -> None:
    leaving, staying = await airport.waiting("a"), await airport.waiting("a")
    await leave(leaving)
    airport.backend.open.set()
    assert await staying == ["a"]

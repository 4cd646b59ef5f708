import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from common.errors import ArenaUnavailableError, CorruptSegmentError, StaleSegmentError
from common.identity import MmHash
from common.observability.telemetry import INTERNAL_ERRORS
from common.transfer import shm
from common.transfer.arena.arena import Arena
from common.transfer.arena.file import ArenaMapping
from common.transfer.arena.layout import HEADER_SIZE
from common.transfer.base import MediaHandle
from common.transfer.codec import decode
from common.transfer.metadata import ShmMetadata
from common.transfer.pages import PrivatePages
from common.transfer.shm import ShmReceiver, ShmSender
from tests.unit.common.transfer.items import image, image_hash, is_image, same
from tests.waiting import until

MakeArena = Callable[..., Arena]


class Pair:
    """An arena, a sender on it, and a receiver that has it mapped."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.sender = ShmSender(arena)
        self.receiver = ShmReceiver()

    async def attach(self) -> None:
        self.attachment = await self.receiver.attach(self.arena.offer)

    def send(self, seed: int, rows: int = 64) -> MediaHandle:
        return self.sender.send(image_hash(seed), image(seed, rows))


MakePair = Callable[..., Awaitable[Pair]]


@pytest.fixture
async def make_pair(make_arena: MakeArena) -> AsyncIterator[MakePair]:
    made: list[Pair] = []

    async def make(*arguments: int) -> Pair:
        made.append(Pair(make_arena(*arguments)))
        await made[-1].attach()
        return made[-1]

    yield make
    for pair in made:
        await pair.receiver.close()


@pytest.fixture
async def pair(make_pair: MakePair) -> Pair:
    return await make_pair()


async def test_tensors_lie_in_the_arena(pair: Pair) -> None:
    handle = pair.send(1)
    received = await pair.receiver.receive(handle.metadata)
    assert same(received.item, image(1))
    assert isinstance(handle.metadata, ShmMetadata)
    pixels = handle.metadata.offset + handle.metadata.layout.buffer_offsets[0]
    pair.arena.memory[pixels] = 200
    assert received.item["pixel_values"].data[0, 0] == 200
    assert received.item["pixel_values"].data.data_ptr() % 64 == 0


async def test_many_readers_of_one_segment(pair: Pair) -> None:
    handle = pair.send(1)
    readers = [await pair.receiver.receive(handle.metadata) for _ in range(3)]
    readers[0].release()
    assert all(is_image(reader.item, 1) for reader in readers[1:])


async def test_an_arena_that_is_not_mapped(pair: Pair) -> None:
    handle = pair.send(1)
    received = await pair.receiver.receive(handle.metadata)
    pair.attachment.detach()
    with pytest.raises(ArenaUnavailableError, match="isn't mapped"):
        await pair.receiver.receive(handle.metadata)
    assert is_image(received.item, 1)


async def test_attaching_again_maps_once(pair: Pair) -> None:
    mapping = pair.receiver.mapping(pair.arena.offer.name)
    await asyncio.gather(*(pair.receiver.attach(pair.arena.offer) for _ in range(3)))
    assert pair.receiver.mapping(pair.arena.offer.name) is mapping


async def test_an_old_sessions_end_takes_nothing_from_a_newer_one(pair: Pair) -> None:
    handle = pair.send(1)
    newer = await pair.receiver.attach(pair.arena.offer)
    pair.attachment.detach()
    pair.attachment.detach()
    with await pair.receiver.receive(handle.metadata) as received:
        assert is_image(received.item, 1)
    newer.detach()
    with pytest.raises(ArenaUnavailableError, match="isn't mapped"):
        await pair.receiver.receive(handle.metadata)


async def test_attaching_that_is_cancelled_keeps_nothing_mapped(
    make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    opens = ArenaMapping.open

    def slow(*arguments: Any) -> ArenaMapping:
        began.set()
        go_on.wait()
        return opens(*arguments)

    monkeypatch.setattr(ArenaMapping, "open", slow)
    arena, receiver = make_arena(), ShmReceiver()
    attaching = asyncio.create_task(receiver.attach(arena.offer))
    await until(began.is_set)
    attaching.cancel()
    await asyncio.gather(attaching, return_exceptions=True)
    go_on.set()
    # It is mapped again, and so let go of by the one who attached it.
    (await receiver.attach(arena.offer)).detach()
    with pytest.raises(ArenaUnavailableError, match="isn't mapped"):
        receiver.mapping(arena.offer.name)
    await receiver.close()


async def test_a_reclaimed_segment_is_stale(make_pair: MakePair) -> None:
    pair = await make_pair(100_000)
    late = pair.send(1)
    late.release()
    pair.send(2)
    with pytest.raises(StaleSegmentError):
        await pair.receiver.receive(late.metadata)


async def test_a_segment_reclaimed_while_in_use_is_found_out(make_pair: MakePair) -> None:
    pair = await make_pair(100_000)
    handle = pair.send(1)
    received = await pair.receiver.receive(handle.metadata)
    received.verify()
    handle.release()
    received.verify()
    pair.send(2)
    with pytest.raises(StaleSegmentError):
        received.verify()


async def test_a_segment_reclaimed_during_decoding_is_found_out(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair(100_000)
    handle = pair.send(1)

    def meanwhile(*arguments: object) -> object:
        handle.release()
        pair.send(2)
        return decode(*arguments)  # type: ignore[arg-type] # passed through

    monkeypatch.setattr(shm, "decode", meanwhile)
    with pytest.raises(StaleSegmentError):
        await pair.receiver.receive(handle.metadata)


@pytest.mark.parametrize(
    "change",
    [
        {"mm_hash": MmHash("f" * 64)},
        {"envelope_size": 100},
        {"buffer_sizes": (64 * 1176 - 1,)},
        {"buffer_sizes": (64 * 1176, 8)},
        {"buffer_sizes": ()},
        {"buffer_sizes": (1 << 40,)},
        {"offset": 0},
        {"offset": 64},
        {"offset": 1 << 40},
    ],
)
async def test_metadata_that_does_not_fit(pair: Pair, change: dict[str, object]) -> None:
    metadata = pair.send(1).metadata.model_copy(update=change)
    with pytest.raises(CorruptSegmentError):
        await pair.receiver.receive(metadata)


async def test_another_generation(pair: Pair) -> None:
    metadata = pair.send(1).metadata.model_copy(update={"generation": 77})
    with pytest.raises(StaleSegmentError):
        await pair.receiver.receive(metadata)


@pytest.mark.parametrize("at", [20, HEADER_SIZE, HEADER_SIZE + 60])
async def test_a_damaged_segment(pair: Pair, at: int) -> None:
    handle = pair.send(1)
    assert isinstance(handle.metadata, ShmMetadata)
    pair.arena.memory[handle.metadata.offset + at] ^= 1
    with pytest.raises(CorruptSegmentError):
        await pair.receiver.receive(handle.metadata)


@pytest.mark.parametrize("pagemap", [True, False])
async def test_what_an_engine_writes_is_not_seen_by_the_next_item(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, pagemap: bool
) -> None:
    if not pagemap:
        monkeypatch.setattr(PrivatePages, "_count_private", lambda *_: None)
    pair = await make_pair(100_000)
    restored = INTERNAL_ERRORS.labels("arena_pages")._value.get()
    handle = pair.send(1)
    received = await pair.receiver.receive(handle.metadata)
    received.item["pixel_values"].data.fill_(99)
    assert bytes(pair.arena.memory[-8:]) == bytes(8)
    again = await pair.receiver.receive(handle.metadata)
    received.release()
    assert is_image(again.item, 1), "another reader of the segment must not see it either"
    again.release()
    handle.release()
    with await pair.receiver.receive(pair.send(2).metadata) as second:
        assert is_image(second.item, 2)
    if pagemap:
        assert INTERNAL_ERRORS.labels("arena_pages")._value.get() == restored + 19


async def test_nothing_is_restored_where_nothing_was_written(pair: Pair) -> None:
    restored = INTERNAL_ERRORS.labels("arena_pages")._value.get()
    for seed in range(20):
        handle = pair.send(seed)
        with await pair.receiver.receive(handle.metadata) as received:
            assert is_image(received.item, seed)
        handle.release()
    assert INTERNAL_ERRORS.labels("arena_pages")._value.get() == restored


async def test_items_outlive_arena_and_receiver(pair: Pair) -> None:
    """Closing a mapping under live tensors would be an error, or worse."""
    received = await pair.receiver.receive(pair.send(1).metadata)
    await pair.receiver.close()
    pair.arena.close()
    gc.collect()
    received.verify()
    assert is_image(received.item, 1)
    received.release()

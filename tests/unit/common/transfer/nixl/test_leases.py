"""Memory of items that came over NIXL: theirs alone until their requests give it back."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import (
    ArenaFullError,
    ArenaUnavailableError,
    CorruptSegmentError,
    TransferTimeoutError,
)
from common.transfer import pages
from common.transfer.base import Received
from common.transfer.checksum import PIECE
from common.transfer.nixl import reading
from common.transfer.nixl_processes.messages import Done, FromReader, Read
from common.transfer.nixl_processes.network import NixlNetwork, nixl_installed
from tests.unit.common.transfer.items import is_image
from tests.unit.common.transfer.nixl.ends import ROOM_FOR_ITEMS, Ends
from tests.waiting import until

pytestmark = pytest.mark.skipif(not nixl_installed(), reason="nixl is not installed")

THIS_HOST = NixlNetwork()
SERVED_BY_ITS_PEER = NixlNetwork(narrowed_to=("posix",))
"""Without copies between processes a frontend that hangs is a read that hangs."""
TCP = NixlNetwork(allow_tcp=True)

LARGE = 8000
"""Rows of an image of 9.4 MB: more pieces than are read of one item at the same time."""

MakeEnds = Callable[..., Ends]

each_network = pytest.mark.parametrize("network", [THIS_HOST, TCP], ids=["this host", "tcp"])


async def connected(make_ends: MakeEnds, network: NixlNetwork, arena_size: int = 16 << 20) -> Ends:
    ends = make_ends(network, arena_size)
    await ends.receiver.attach(ends.offer)
    return ends


def address(received: Received) -> int:
    """Of an image's pixels."""
    return int(received.item["pixel_values"].data.data_ptr())


def lands(received: Received, ends: Ends) -> bool:
    """Whether an image's pixels lie where some process may read to."""
    start = pages.address_of(memoryview(ends.landing_memory))
    return start <= address(received) < start + ends.landing.size


def mapped_areas() -> int:
    """Landing areas that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("mmrouter-nixl" in line for line in lines)


async def test_within_a_host_tensors_are_used_where_they_landed(make_ends: MakeEnds) -> None:
    ends = await connected(make_ends, THIS_HOST)
    received = await ends.receive(7)
    assert lands(received, ends)
    assert ends.landing.rooms.free_bytes < ROOM_FOR_ITEMS
    assert ends.receiver.free_slots == 2, "only reads take slots"
    assert is_image(received.item, 7)
    received.release()
    received.release()
    assert ends.landing.rooms.free_bytes == ROOM_FOR_ITEMS


async def test_where_a_network_can_be_reached_tensors_are_copied_out(make_ends: MakeEnds) -> None:
    """Strangers may write to the landing area at any time, see ``test_strangers.py``."""
    ends = await connected(make_ends, TCP)
    copies = ends.receiver._reading._copies
    with await ends.receive(7) as received:
        assert not lands(received, ends)
        assert copies.free_bytes < ROOM_FOR_ITEMS
    assert copies.free_bytes == ROOM_FOR_ITEMS


@each_network
async def test_memory_in_use_is_given_to_no_other_item(
    make_ends: MakeEnds, network: NixlNetwork
) -> None:
    ends = await connected(make_ends, network)
    held = [await ends.receive(seed) for seed in (1, 2, 3)]
    held[1].release()
    for seed in range(10, 40):
        with await ends.receive(seed) as received:
            assert is_image(received.item, seed)
            assert address(received) not in (address(held[0]), address(held[2]))
    assert is_image(held[0].item, 1)
    assert is_image(held[2].item, 3)
    held[0].release()
    held[2].release()


@each_network
async def test_items_that_find_no_room_get_memory_of_their_own(
    make_ends: MakeEnds, network: NixlNetwork
) -> None:
    """However long requests hold theirs, others don't wait."""
    ends = await connected(make_ends, network)
    held = {seed: await ends.receive(seed) for seed in range(1, 20)}
    held[20] = await ends.receive(20, LARGE)
    assert not lands(held[20], ends)
    assert all(is_image(received.item, seed) for seed, received in held.items())
    for received in held.values():
        received.release()
    rooms = ends.landing.rooms if network is THIS_HOST else ends.receiver._reading._copies
    assert rooms.free_bytes == ROOM_FOR_ITEMS
    assert await ends.carry(21)


@pytest.mark.parametrize("size", [1 << 36, 1 << 61])
@each_network
async def test_an_item_that_is_said_to_be_huge_takes_no_memory(
    make_ends: MakeEnds, network: NixlNetwork, size: int
) -> None:
    """A frontend may say what it likes of its arena and of its items."""
    ends = await connected(make_ends, network)
    huge = ends.offer.arena.model_copy(update={"size": 1 << 62})
    await ends.receiver._peers.attach(ends.offer)
    ends.receiver._peers._offers[ends.offer.agent] = ends.offer.model_copy(update={"arena": huge})
    metadata = ends.send(1).model_copy(update={"buffer_sizes": (size,)})
    with pytest.raises(ArenaFullError, match="finds no memory"):
        await ends.receiver.receive(metadata)
    assert await ends.carry(2)


async def test_items_that_find_no_room_share_a_limit(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = await connected(make_ends, THIS_HOST, 64 << 20)
    metadata = ends.send(1, LARGE)
    monkeypatch.setattr(reading, "MAX_OWN_BYTES", 2 * metadata.layout.length)
    held = [await ends.receiver.receive(metadata) for _ in range(2)]
    with pytest.raises(ArenaFullError):
        await ends.receiver.receive(metadata)
    held.pop().release()
    with await ends.receiver.receive(metadata) as received:  # after what was given back
        assert is_image(received.item, 1)
    held.pop().release()


@each_network
async def test_of_a_large_item_each_piece_is_checked(
    make_ends: MakeEnds, network: NixlNetwork
) -> None:
    ends = await connected(make_ends, network)
    metadata = ends.send(7, LARGE)
    with await ends.receiver.receive(metadata) as received:
        assert is_image(received.item, 7)
    for at in range(metadata.offset + PIECE // 2, metadata.offset + metadata.layout.length, PIECE):
        ends.arena.memory[at] ^= 1
        with pytest.raises(CorruptSegmentError, match="checksum"):
            await ends.receiver.receive(metadata)
        ends.arena.memory[at] ^= 1
    assert ends.receiver.free_slots == 2


@each_network
async def test_an_item_that_is_refused_leaves_nothing(
    make_ends: MakeEnds, network: NixlNetwork
) -> None:
    ends = await connected(make_ends, network)
    metadata = ends.send(7)
    ends.arena.memory[metadata.offset + metadata.layout.length - 1] ^= 1
    for _ in range(20):
        with pytest.raises(CorruptSegmentError):
            await ends.receiver.receive(metadata)
    assert ends.landing.rooms.free_bytes + ends.receiver._reading._copies.free_bytes == (
        ROOM_FOR_ITEMS
    )
    assert ends.receiver.free_slots == 2


async def test_a_late_read_keeps_its_room(make_ends: MakeEnds) -> None:
    """Its bytes may still come, and must not come into another item."""
    ends = await connected(make_ends, SERVED_BY_ITS_PEER)
    others = await connected(make_ends, SERVED_BY_ITS_PEER)
    await ends.receiver.attach(others.offer)
    late, another = ends.send(7), others.send(8)
    ends.receiver._peers.deadline = 0.3
    assert ends.sender.pid is not None
    os.kill(ends.sender.pid, signal.SIGSTOP)
    with pytest.raises(TransferTimeoutError):
        await ends.receiver.receive(late)
    assert ends.landing.rooms.free_bytes < ROOM_FOR_ITEMS
    assert ends.receiver.free_slots == 1
    ends.receiver._peers.deadline = 20.0
    held = [await ends.receiver.receive(another) for _ in range(5)]
    os.kill(ends.sender.pid, signal.SIGCONT)
    await until(lambda: ends.receiver.free_slots == 2)
    assert all(is_image(each.item, 8) for each in held)
    for each in held:
        each.release()
    await until(lambda: ends.landing.rooms.free_bytes == ROOM_FOR_ITEMS)  # the late one's, too
    assert await ends.carry(7)


async def test_items_outlive_the_process_that_read_them(make_ends: MakeEnds) -> None:
    ends = await connected(make_ends, THIS_HOST)
    before = mapped_areas()
    held = await ends.receive(7)
    former = ends.receiver._reading.pid
    assert former is not None
    os.kill(former, signal.SIGKILL)
    await until(lambda: ends.receiver._reading.pid not in (None, former))
    await until(lambda: ends.offer.agent in ends.receiver._peers._offers)
    for seed in range(10, 30):
        assert await ends.carry(seed)
    assert is_image(held.item, 7)
    assert not lands(held, ends), "the next process has an area of its own"
    assert mapped_areas() == before + 1
    held.release()
    await until(lambda: gc.collect() >= 0 and mapped_areas() == before)


async def test_reads_that_wait_when_their_process_ends_are_not_made_by_the_next(
    make_ends: MakeEnds,
) -> None:
    """The next process has other memory at the place for which they were meant."""
    ends = await connected(make_ends, SERVED_BY_ITS_PEER)
    assert ends.sender.pid is not None
    metadata = [ends.send(1, LARGE), ends.send(2)]
    os.kill(ends.sender.pid, signal.SIGSTOP)
    reads = [asyncio.create_task(ends.receiver.receive(each)) for each in metadata]
    await until(lambda: ends.receiver.free_slots == 0)
    area, pid = ends.landing, ends.receiver._reading.pid
    assert pid is not None
    ends.receiver._peers.close()  # or it would read the probe as soon as there is another process
    os.kill(pid, signal.SIGKILL)
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(outcome, ArenaUnavailableError)
    await until(lambda: ends.link._landing not in (None, area))
    assert ends.receiver.free_slots == 2
    assert area.free == 2
    assert ends.landing.rooms.free_bytes == area.rooms.free_bytes == ROOM_FOR_ITEMS
    os.kill(ends.sender.pid, signal.SIGCONT)


async def test_an_answer_that_comes_twice_copies_nothing_twice(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took the process over could change the bytes after they were checked."""
    ends = await connected(make_ends, TCP)
    heard = ends.link._heard

    def twice(message: FromReader) -> object:
        awaited = heard(message)
        ends.landing_memory[:] = bytes(ends.landing.size)
        assert heard(message) is None
        return awaited

    monkeypatch.setattr(ends.link, "_heard", twice)
    with await ends.receive(7) as received:
        assert is_image(received.item, 7)


async def test_a_worker_that_is_busy_loses_no_answer_and_no_process(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more answers than fit between the two processes, which come faster than they are read."""
    ends = await connected(make_ends, THIS_HOST)
    former, agent = ends.pids, ends.offer.agent
    pieces, unread, heard = 1000, 1000, ends.link._heard

    def slowly(message: FromReader) -> object:
        nonlocal unread
        if isinstance(message, Done) and message.number == -1:
            unread -= 1
            time.sleep(0.001)
        return heard(message)

    monkeypatch.setattr(ends.link, "_heard", slowly)
    ends.link._process.send(Read(-1, agent, ends.offer.address, 0, 64 * pieces, 64))
    await until(lambda: unread == 0)
    assert await ends.carry(7)
    assert ends.pids == former

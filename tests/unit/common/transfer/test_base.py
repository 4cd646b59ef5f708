import asyncio
from itertools import pairwise

import pytest

from common.errors import CorruptSegmentError, StaleSegmentError
from common.observability.telemetry import STAGE_FAILURES, STAGE_SECONDS
from common.transfer.base import MediaHandle, Received, Turns, join_frames
from common.transfer.inline import InlineReceiver, InlineSender
from common.transfer.metadata import ShmMetadata
from tests.fakes.memory_transport import MemoryReceiver, MemorySender, MemoryStore
from tests.unit.common.transfer.items import image, image_hash, is_image


def at(slot: int) -> ShmMetadata:
    return ShmMetadata(
        mm_hash=image_hash(slot),
        envelope_size=0,
        buffer_sizes=(),
        arena="a",
        offset=slot,
        generation=0,
    )


def stages(name: str) -> float:
    return float(STAGE_SECONDS.labels(name)._sum.get())


async def test_each_end_is_a_stage() -> None:
    store = MemoryStore()
    sent, received = stages("send_shm"), stages("receive_shm")
    handle = MemorySender(store).send(image_hash(1), image(1))
    await MemoryReceiver(store).receive(handle.metadata)
    assert stages("send_shm") > sent
    assert stages("receive_shm") > received
    store.reclaim()
    failures = STAGE_FAILURES.labels("receive_shm", "StaleSegmentError")
    before = failures._value.get()
    with pytest.raises(StaleSegmentError):
        await MemoryReceiver(store).receive(handle.metadata)
    assert failures._value.get() == before + 1


async def test_metadata_of_another_transport_is_refused() -> None:
    handle = InlineSender().send(image_hash(1), image(1))
    with pytest.raises(CorruptSegmentError, match="inline"):
        await MemoryReceiver(MemoryStore()).receive(handle.metadata)


def test_a_loan_is_released_once() -> None:
    released: list[int] = []
    metadata = at(0)
    with MediaHandle(metadata, on_release=lambda: released.append(1)) as handle:
        pass
    handle.release()
    assert released == [1]


def test_a_received_item_is_released_once_and_then_is_empty() -> None:
    released: list[int] = []
    received = Received(image_hash(1), image(1), on_release=lambda: released.append(1))
    with received:
        assert len(received.item) == 2
    received.release()
    received.verify()
    assert released == [1]
    assert not received.item


async def test_frames_of_several_items_in_one_message() -> None:
    sender = InlineSender()
    store = MemoryStore()
    handles = [
        sender.send(image_hash(1), image(1)),
        MemorySender(store).send(image_hash(2), image(2)),
        sender.send(image_hash(3), image(3)),
    ]
    metadata, frames = join_frames(handles)
    assert len(frames) == 4
    views = [memoryview(frame) for frame in frames]
    for seed, each in ((1, metadata[0]), (3, metadata[2])):
        received = await InlineReceiver().receive(each, views)
        assert is_image(received.item, seed)


async def test_a_burst_of_items_does_not_take_the_event_loop_to_itself() -> None:
    turns = Turns()
    counts: list[int] = []
    done = 0

    async def take() -> None:
        nonlocal done
        await turns.mine()
        done += 1

    async def watch() -> None:
        while done < 20:
            counts.append(done)
            await asyncio.sleep(0)

    await asyncio.gather(watch(), *(take() for _ in range(20)))
    assert max(after - before for before, after in pairwise(counts)) <= 1
    # And nobody waits who comes alone.
    took = turns.mine()
    with pytest.raises(StopIteration):
        took.send(None)

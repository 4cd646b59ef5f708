"""What a request has in hand, and how it lets go of that."""

import asyncio
import threading

import pytest
from vllm.multimodal.inputs import MultiModalKwargsItem

from backend_worker.plane.media_receiver import MediaReceiver, ReceivedMedia
from common.errors import CorruptSegmentError, MediaMissingError
from common.transfer.base import Received
from common.transfer.inline import InlineSender
from common.transfer.metadata import encode_metadata
from common.transfer.transports import receivers
from tests.fakes.engine import no_rendering
from tests.unit.common.transfer.items import image, image_hash

MIB = 1 << 20


async def let_go(*checked: int) -> list[int]:
    """In which threads items with so many bytes to look through are released."""
    threads: list[int] = []
    received = ReceivedMedia()
    for number, nbytes in enumerate(checked):
        received.add(
            Received(
                image_hash(number),
                MultiModalKwargsItem({}),
                on_release=lambda: threads.append(threading.get_ident()),
                checked=nbytes,
            )
        )
    await received.give_back()
    assert not received.items
    await received.give_back()
    return threads


async def test_what_takes_a_moment_is_given_back_at_once() -> None:
    here = threading.get_ident()
    assert await let_go() == []
    assert await let_go(8 * MIB, 8 * MIB, 0) == [here] * 3


async def test_what_takes_long_does_not_hold_up_the_event_loop() -> None:
    here = threading.get_ident()
    for checked in ([100 * MIB], [8 * MIB] * 3):
        threads = await let_go(*checked)
        assert len(threads) == len(checked) and here not in threads


async def test_metadata_that_names_no_item_is_an_error_with_a_kind() -> None:
    media_receiver = MediaReceiver(receivers(no_rendering))
    with pytest.raises(CorruptSegmentError):
        await media_receiver.receive([b"garbage"], (), ReceivedMedia())
    await media_receiver.close()


async def test_many_descriptions_leave_turns_to_other_tasks() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    described = [encode_metadata(InlineSender().send(image_hash(1), image(1)).metadata)] * 1000
    with pytest.raises(CorruptSegmentError):
        await MediaReceiver([]).receive([*described, b"garbage"], (), ReceivedMedia())
    assert turns > 50
    counting.cancel()


async def test_a_transport_that_a_worker_lacks_brings_nothing() -> None:
    handle = InlineSender().send(image_hash(1), image(1))
    with pytest.raises(MediaMissingError, match="ArenaUnavailableError"):
        await MediaReceiver([]).receive([encode_metadata(handle.metadata)], (), ReceivedMedia())

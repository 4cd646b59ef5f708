"""What holds for each transport alike."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, get_args

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from common.errors import StaleSegmentError, UnsupportedItemError
from common.transfer.arena.arena import Arena
from common.transfer.base import (
    MediaHandle,
    MmKwargsReceiver,
    MmKwargsSender,
    Received,
    join_frames,
)
from common.transfer.inline import InlineReceiver, InlineSender
from common.transfer.metadata import Transport, decode_metadata, encode_metadata
from common.transfer.nixl.receiver import NixlReceiver
from common.transfer.nixl.sender import LateNixl, NixlSender
from common.transfer.nixl_processes.network import NixlNetwork, nixl_installed
from common.transfer.shm import ShmReceiver, ShmSender
from common.transfer.transports import TransferMode, late_senders, receivers, senders, wanted
from tests.fakes.engine import no_rendering
from tests.fakes.memory_transport import MemoryReceiver, MemorySender, MemoryStore
from tests.unit.common.transfer.items import image, image_hash, is_image, same

MakeArena = Callable[..., Arena]
SHARED = MultiModalFieldConfig.shared("image", 2).field


class Ends(NamedTuple):
    sender: MmKwargsSender
    receiver: MmKwargsReceiver[Any]

    async def carry(self, handle: MediaHandle) -> Received:
        """As over the wire: metadata as bytes, frames as ZeroMQ gives them."""
        frames = [memoryview(bytearray(frame)) for frame in handle.frames]
        return await self.receiver.receive(
            decode_metadata(encode_metadata(handle.metadata)), frames
        )


@asynccontextmanager
async def inline(make_arena: MakeArena) -> AsyncIterator[Ends]:
    yield Ends(InlineSender(), InlineReceiver())


@asynccontextmanager
async def memory(make_arena: MakeArena) -> AsyncIterator[Ends]:
    store = MemoryStore()
    yield Ends(MemorySender(store), MemoryReceiver(store))


@asynccontextmanager
async def nixl(make_arena: MakeArena) -> AsyncIterator[Ends]:
    if not nixl_installed():
        pytest.skip("nixl is not installed")
    sender = NixlSender(make_arena(), NixlNetwork())
    receiver = NixlReceiver(NixlNetwork(), slots=2, memory=1 << 20)
    assert sender.offer is not None
    await receiver.attach(sender.offer)
    yield Ends(sender, receiver)


@asynccontextmanager
async def shm(make_arena: MakeArena) -> AsyncIterator[Ends]:
    arena = make_arena()
    receiver = ShmReceiver()
    await receiver.attach(arena.offer)
    yield Ends(ShmSender(arena), receiver)


ENDS: dict[str, Callable[[MakeArena], AbstractAsyncContextManager[Ends]]] = {
    "inline": inline,
    "memory": memory,
    "nixl": nixl,
    "shm": shm,
}


@pytest.fixture(params=ENDS)
async def ends(request: pytest.FixtureRequest, make_arena: MakeArena) -> AsyncIterator[Ends]:
    async with ENDS[request.param](make_arena) as ends:
        yield ends
        ends.sender.close()
        await ends.receiver.close()


def test_no_transport_is_forgotten() -> None:
    """The reference carries no tensors; the one in memory is a fake of tests."""
    assert {*ENDS, "reference"} == {*get_args(Transport), "memory"}, "add it to ENDS"


def sending(mode: TransferMode, arena: Arena) -> list[Transport]:
    ends: list[MmKwargsSender | LateNixl] = [
        *senders(arena, mode),
        *late_senders(arena, mode, NixlNetwork()),
    ]
    return [end.transport for end in ends]


@pytest.fixture
async def receiving() -> AsyncIterator[list[Transport]]:
    """In the order in which a worker tries what is offered."""
    ends = receivers(no_rendering, NixlReceiver(NixlNetwork()))
    yield [end.transport for end in ends]
    for end in ends:
        await end.close()


async def test_every_transport_has_its_two_ends_in_the_list(
    make_arena: MakeArena, receiving: list[Transport]
) -> None:
    arena = make_arena()
    sent = {name for mode in TransferMode for name in sending(mode, arena)}
    listed = "list both ends in transports.py; a mode there must want it"
    assert sent == set(receiving) == set(get_args(Transport)), listed


async def test_a_mode_wants_what_there_is_in_the_order_in_which_it_is_tried(
    make_arena: MakeArena, receiving: list[Transport]
) -> None:
    arena = make_arena()
    for mode in TransferMode:
        assert set(wanted(mode)) <= set(sending(mode, arena))
        assert sorted(wanted(mode), key=receiving.index) == list(wanted(mode))


DATA: dict[str, object] = {
    "float32": torch.randn(300, 40),
    "bfloat16": torch.randn(300, 40).bfloat16(),
    "transposed": torch.randn(300, 40).T,
    "empty": torch.zeros(0, 5),
    "scalar": torch.tensor(7),
    "nested": [torch.randn(100), [torch.randn(3), torch.randn(200)]],
    "list": [],
    "float": 2.5,
    "none": None,
}


async def test_items_arrive_as_they_were(ends: Ends, subtests: pytest.Subtests) -> None:
    for number, (name, data) in enumerate(DATA.items()):
        with subtests.test(name):
            item = MultiModalKwargsItem({"x": MultiModalFieldElem(data=data, field=SHARED)})
            with ends.sender.send(image_hash(number), item) as handle:
                assert handle.metadata.mm_hash == image_hash(number)
                with await ends.carry(handle) as received:
                    assert received.mm_hash == image_hash(number)
                    assert same(received.item, item)


async def test_an_item_without_fields(ends: Ends) -> None:
    handle = ends.sender.send(image_hash(1), MultiModalKwargsItem({}))
    with await ends.carry(handle) as received:
        assert not received.item


async def test_the_same_item_twice(ends: Ends) -> None:
    handles = [ends.sender.send(image_hash(1), image(1)) for _ in range(2)]
    handles[0].release()
    with await ends.carry(handles[1]) as received:
        assert is_image(received.item, 1)


async def test_two_items_in_one_message(ends: Ends) -> None:
    handles = [ends.sender.send(image_hash(seed), image(seed)) for seed in (1, 2)]
    described, frames = join_frames(handles)
    for seed, metadata in zip((1, 2), described, strict=True):
        views = [memoryview(bytearray(frame)) for frame in frames]
        sent = decode_metadata(encode_metadata(metadata))
        with await ends.receiver.receive(sent, views) as received:
            assert is_image(received.item, seed)


async def test_unsupported_items_leave_nothing(ends: Ends) -> None:
    item = MultiModalKwargsItem({"x": MultiModalFieldElem(data="text", field=SHARED)})
    with pytest.raises(UnsupportedItemError):
        ends.sender.send(image_hash(1), item)
    assert ends.sender.send_held(image_hash(1)) is None


async def test_tensors_are_writable(ends: Ends) -> None:
    """torch warns of memory that isn't, and undefined behaviour follows."""
    with await ends.carry(ends.sender.send(image_hash(1), image(1))) as received:
        received.item["pixel_values"].data.add_(1)


async def test_a_scripted_failure_of_the_memory_transport() -> None:
    store = MemoryStore()
    ends = Ends(MemorySender(store), MemoryReceiver(store))
    handle = ends.sender.send(image_hash(1), image(1))
    store.fail_next.append(StaleSegmentError("gone"))
    with pytest.raises(StaleSegmentError):
        await ends.carry(handle)
    with await ends.carry(handle):
        assert store.unreleased == 1
    assert store.unreleased == 0
    handle.release()
    assert store.held == 0

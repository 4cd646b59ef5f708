from collections.abc import Callable

import pytest

from common.observability.telemetry import TRANSFER_FALLBACKS
from common.transfer.arena.arena import Arena
from common.transfer.inline import InlineReceiver, InlineSender
from common.transfer.metadata import Transport
from common.transfer.shm import ShmReceiver, ShmSender
from common.transfer.transports import (
    SenderSet,
    TransferMode,
    TransportChoice,
    choose_transport,
)
from tests.unit.common.transfer.items import image, image_hash, is_image


@pytest.mark.parametrize(
    ("mode", "shm", "nixl", "choice"),
    [
        (TransferMode.AUTO, True, True, TransportChoice("shm")),
        (TransferMode.AUTO, True, False, TransportChoice("shm")),
        (TransferMode.AUTO, False, True, TransportChoice("nixl", "shm", "not_readable")),
        (TransferMode.AUTO, False, False, TransportChoice("inline", "shm", "not_readable")),
        (TransferMode.SHM, True, False, TransportChoice("shm")),
        (TransferMode.SHM, False, True, TransportChoice("inline", "shm", "not_readable")),
        (TransferMode.NIXL, True, True, TransportChoice("nixl")),
        (TransferMode.NIXL, True, False, TransportChoice("inline", "nixl", "not_connected")),
    ],
)
def test_choices(mode: TransferMode, shm: bool, nixl: bool, choice: TransportChoice) -> None:
    proven: dict[Transport, bool] = {"nixl": nixl, "shm": shm}
    assert choose_transport(mode, [name for name, yes in proven.items() if yes]) == choice


def fallbacks(transport: str, reason: str) -> float:
    return float(TRANSFER_FALLBACKS.labels(transport, reason)._value.get())


async def test_a_full_arena_sends_inline_and_counts(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(100_000)
    senders = SenderSet([ShmSender(arena), InlineSender()])
    shm = ShmReceiver()
    await shm.attach(arena.offer)
    inline = InlineReceiver()
    before = fallbacks("shm", "arena_full")
    handles = [
        senders.send(TransportChoice("shm"), image_hash(seed), image(seed)) for seed in range(2)
    ]
    assert [handle.metadata.transport for handle in handles] == ["shm", "inline"]
    assert fallbacks("shm", "arena_full") == before + 1
    with await shm.receive(handles[0].metadata) as received:
        assert is_image(received.item, 0)
    views = [memoryview(frame) for frame in handles[1].frames]
    with await inline.receive(handles[1].metadata, views) as received:
        assert is_image(received.item, 1)
    await shm.close()


def test_a_closed_arena_sends_inline_and_counts(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena()
    arena.close()
    before = fallbacks("shm", "arena_unavailable")
    handle = SenderSet([ShmSender(arena), InlineSender()]).send(
        TransportChoice("shm"), image_hash(1), image(1)
    )
    assert handle.metadata.transport == "inline"
    assert fallbacks("shm", "arena_unavailable") == before + 1


def test_the_second_best_choice_is_counted_per_item(make_arena: Callable[..., Arena]) -> None:
    senders = SenderSet([ShmSender(make_arena()), InlineSender()])
    before = fallbacks("nixl", "not_connected")
    choice = TransportChoice("inline", "nixl", "not_connected")
    senders.send(choice, image_hash(1), image(1))
    assert fallbacks("nixl", "not_connected") == before + 1
    assert senders.send_held(choice, image_hash(1)) is None
    assert fallbacks("nixl", "not_connected") == before + 1


def test_held_items(make_arena: Callable[..., Arena]) -> None:
    senders = SenderSet([ShmSender(make_arena()), InlineSender()])
    assert senders.send_held(TransportChoice("shm"), image_hash(1)) is None
    senders.send(TransportChoice("shm"), image_hash(1), image(1)).release()
    handle = senders.send_held(TransportChoice("shm"), image_hash(1))
    assert handle is not None
    assert handle.metadata.transport == "shm"

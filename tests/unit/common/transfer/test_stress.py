"""Concurrent writers, evictions and readers, late ones included: no image is ever seen
under another's hash."""

import asyncio
import random
import threading
from collections.abc import Callable

import pytest

from common.errors import ArenaFullError, StaleSegmentError
from common.transfer.arena.arena import Arena
from common.transfer.base import MediaHandle
from common.transfer.shm import ShmReceiver, ShmSender
from tests.unit.common.transfer.items import image, image_hash, is_image

IMAGES = 60
WRITERS = 3
ROUNDS = 400


@pytest.mark.parametrize("seed", range(2))
def test_pixels_and_hashes_stay_together(make_arena: Callable[..., Arena], seed: int) -> None:
    arena = make_arena(600_000)
    sender = ShmSender(arena)
    # Each entry was leased; half of them have been taken back before anybody reads.
    leased: list[tuple[int, MediaHandle, bool]] = []
    changed = threading.Condition()
    writing = WRITERS
    full = 0

    def write(chance: random.Random) -> None:
        nonlocal writing, full
        for _ in range(ROUNDS):
            number = chance.randrange(IMAGES)
            try:
                handle = sender.send(image_hash(number), image(number, rows=20 + number))
            except ArenaFullError:
                full += 1
                continue
            late = chance.random() < 0.5
            if late:
                handle.release()
            with changed:
                leased.append((number, handle, late))
                changed.notify_all()
                # Otherwise a slow reader's backlog keeps the arena full.
                changed.wait_for(lambda: len(leased) < 3)
        with changed:
            writing -= 1
            changed.notify_all()

    async def read() -> tuple[int, int]:
        receiver = ShmReceiver()
        await receiver.attach(arena.offer)
        good = stale = 0
        while True:
            with changed:
                changed.wait_for(lambda: leased or not writing)
                if not leased:
                    await receiver.close()
                    return good, stale
                number, handle, late = leased.pop(0)
                changed.notify_all()
            try:
                with await receiver.receive(handle.metadata) as received:
                    right = is_image(received.item, number)
                    received.verify()
                    assert right, f"image {number} had other pixels, and nothing told"
                    good += 1
            except StaleSegmentError:
                assert late, "a leased segment was reclaimed"
                stale += 1
            handle.release()

    threads = [
        threading.Thread(target=write, args=(random.Random(seed * WRITERS + i),))
        for i in range(WRITERS)
    ]
    for thread in threads:
        thread.start()
    good, stale = asyncio.run(read())
    for thread in threads:
        thread.join()
    assert good > 100
    assert stale > 0
    assert good + stale + full == WRITERS * ROUNDS
    figures = arena.statistics()
    assert (figures.leases, figures.bytes_leased) == (0, 0)
    assert figures.evictions > 100

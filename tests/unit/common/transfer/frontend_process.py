"""What the second process of the two-process tests does: own an arena."""

import time
from collections.abc import Generator
from contextlib import closing
from typing import Any

from common.transfer.arena.arena import Arena
from common.transfer.nixl.sender import NixlSender
from common.transfer.nixl_processes.network import NixlNetwork
from common.transfer.shm import ArenaSender, ShmSender
from tests.unit.common.transfer.items import image, image_hash


def frontend(transport: str, size: int, allow_tcp: bool = False) -> Generator[Any, Any, None]:
    """Yields the offer; then, for each (command, seed, rows), what the command gives.

    ``send`` gives the metadata and keeps the handle; ``release`` releases it; ``offer`` gives the
    pid of the process that serves the arena now, and its offer.
    """
    with closing(Arena(size)) as arena:
        if transport == "shm":
            sender: ArenaSender = ShmSender(arena)
            offer = arena.offer.model_dump()
        else:
            sender = NixlSender(arena, NixlNetwork(allow_tcp=allow_tcp))
            offer = None
        handles = {}
        answer: Any = offer
        try:
            while True:
                command, seed, *rows = yield answer
                if command == "send":
                    handles[seed] = sender.send(image_hash(seed), image(seed, *rows))
                    answer = handles[seed].metadata.model_dump()
                elif command == "offer":
                    assert isinstance(sender, NixlSender)
                    while (current := sender.offer) is None:
                        time.sleep(0.01)  # it is being replaced
                    answer = [sender.pid, current.model_dump()]
                else:
                    handles.pop(seed).release()
                    answer = None
        finally:
            sender.close()

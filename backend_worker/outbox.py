"""Outputs that leave for one frontend in one message: all of one step of the engine. No I/O.

What a message costs is mostly per message: encoding, socket, waking whoever reads. A step gives
each running request an output at the same time, so they share one.
"""

import asyncio
from collections.abc import Iterable
from itertools import islice

from common.identity import RequestId
from common.protocol import Output


class Outbox:
    """At most one output of each request: whoever has another one waits, and the engine
    merges what follows, so a frontend that reads slowly holds up only its own requests.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Output] = {}
        self._left = asyncio.Event()
        self._closed = False

    def __bool__(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._waiting)

    async def put(self, output: Output) -> None:
        """Add an output once the one before it has left. Does nothing once it is closed."""
        while output.request_id in self._waiting:
            self._left.clear()
            await self._left.wait()
        if not self._closed:
            self._waiting[output.request_id] = output

    def first(self, most: int) -> list[Output]:
        """So many, or what there is, in the order in which they came. They stay here."""
        return list(islice(self._waiting.values(), most))

    def take_out(self, outputs: Iterable[Output]) -> None:
        """They were sent, or never will be."""
        for output in outputs:
            self._waiting.pop(output.request_id, None)
        self._left.set()

    def close(self) -> None:
        """Nobody will be sent anything any more, and nobody waits."""
        self._closed = True
        self._waiting.clear()
        self._left.set()

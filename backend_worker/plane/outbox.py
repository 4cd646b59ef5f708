"""Outputs that leave for one frontend in one message: all of one step of the engine.

What a message costs is mostly per message: encoding, socket, waking whoever reads. A step gives
each running request an output at the same time, so they share one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeAlias

from vllm.logprobs import FlatLogprobs

from common.errors import ProtocolError
from common.identity import RequestId
from common.request_plane.protocol import MOST_OUTPUTS, Output, Outputs

FULL_PAUSE_S: Final = 0.01
"""How often a full queue is looked at again: a socket can't tell that one of its peers
has room."""

MOST_LOGPROBS: Final = 4096
"""Log probabilities of one message, unless one output has more: they are what makes outputs large,
and a frontend decodes a message in one go."""

Unsendable: TypeAlias = Callable[[ProtocolError], object]


class Outbox:
    """At most one output of each request: whoever has another one waits, and the engine
    merges what follows, so a frontend that reads slowly holds up only its own requests."""

    def __init__(
        self,
        send: Callable[[Outputs], Awaitable[bool]],
        aside: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        """Send if there is room, without waiting; what takes time runs aside."""
        self._send = send
        self._aside = aside
        self._waiting: dict[RequestId, tuple[Output, Unsendable]] = {}
        self._left = asyncio.Event()
        self._sending = False
        self._closed = False

    def offer(self, output: Output, unsendable: Unsendable) -> bool:
        """Take an output, unless one of its request waits; says whether it did. It leaves with
        those that other requests get in the same step: they come in the same turn of the event
        loop, in which the task that sends them does not begin yet. One without an encoding is never
        sent, and told of. A closed outbox forgets it."""
        if self._closed:
            return True
        if output.request_id in self._waiting:
            return False
        self._waiting[output.request_id] = output, unsendable
        if not self._sending:
            self._sending = True
            self._aside(self._send_soon())
        return True

    async def put(self, output: Output, unsendable: Unsendable) -> None:
        """As :meth:`offer`, once the output before it has left."""
        while not self.offer(output, unsendable):
            await self.left(output.request_id)

    async def left(self, request_id: RequestId) -> None:
        """Wait until no output of a request waits: it was sent, or turned out to be unsendable."""
        while request_id in self._waiting:
            self._left.clear()
            await self._left.wait()

    async def send(self) -> bool:
        """Send what waits if there is room; says whether nothing waits any more. Never waits."""
        most = MOST_OUTPUTS
        while first := self._first(most):
            try:
                if not await self._send(Outputs([output for output, _ in first])):
                    return False
            except ProtocolError as error:
                if len(first) > 1:
                    most = 1  # one of them has no encoding: find out which
                    continue
                first[0][1](error)
            for output, _ in first:
                self._waiting.pop(output.request_id, None)
            self._left.set()
        return True

    def close(self) -> None:
        """Nothing will be sent any more, and nobody waits."""
        self._closed = True
        self._waiting.clear()
        self._left.set()

    def _first(self, most: int) -> list[tuple[Output, Unsendable]]:
        """Those that have waited longest, as many as one message takes."""
        first: list[tuple[Output, Unsendable]] = []
        logprobs = 0
        for waiting in self._waiting.values():
            logprobs += _logprobs(waiting[0])
            if first and (logprobs > MOST_LOGPROBS or len(first) == most):
                break
            first.append(waiting)
        return first

    async def _send_soon(self) -> None:
        try:
            while True:
                if await self.send():
                    return
                await asyncio.sleep(FULL_PAUSE_S)
        finally:
            self._sending = False


def _logprobs(output: Output) -> int:
    lists = [one.logprobs for one in output.outputs if one.logprobs]
    if output.prompt_logprobs:
        lists.append(output.prompt_logprobs)
    return sum(
        len(each.token_ids)
        if isinstance(each, FlatLogprobs)
        else sum(len(position or ()) for position in each)
        for each in lists
    )

"""Batch the outputs of one engine step into one message per frontend.

Most of a message's cost is fixed: encoding, socket, waking the reader. A step gives each running
request an output at the same time, so they share a message.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeAlias

from vllm.logprobs import FlatLogprobs

from common.errors import ProtocolError
from common.identity import RequestId
from common.request_plane.protocol import MAX_OUTPUTS, Output, Outputs

FULL_PAUSE_S: Final = 0.01
"""How often a full queue is looked at again: a socket can't tell that one of its peers
has room."""

MAX_LOGPROBS: Final = 4096
"""Log probabilities of one message, unless one output has more: they are what makes outputs large,
and a frontend decodes a message in one go."""

Unsendable: TypeAlias = Callable[[ProtocolError], object]


class Outbox:
    """Hold at most one output per request; further outputs wait. The engine merges the outputs that
    wait, so a slow frontend delays only its own requests."""

    def __init__(
        self,
        send: Callable[[Outputs], Awaitable[bool]],
        aside: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        """``send`` sends if there is room, never waiting; ``aside`` runs a coroutine in a task."""
        self._send = send
        self._aside = aside
        self._waiting: dict[RequestId, tuple[Output, Unsendable]] = {}
        self._left = asyncio.Event()
        self._sending = False
        self._closed = False

    def offer(self, output: Output, unsendable: Unsendable) -> bool:
        """Queue an output unless one of its request is queued; return whether it was taken.

        It leaves with the outputs of the same engine step: they arrive in one turn of the event
        loop, before the sending task starts. An output that can't be encoded is dropped and
        reported to ``unsendable``. A closed outbox drops everything.
        """
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
        """Queue an output, once the one before it has left."""
        while not self.offer(output, unsendable):
            await self.left(output.request_id)

    async def left(self, request_id: RequestId) -> None:
        """Wait until no output of a request is queued: it was sent, or could not be encoded."""
        while request_id in self._waiting:
            self._left.clear()
            await self._left.wait()

    async def send(self) -> bool:
        """Send queued outputs if there is room; return whether the queue is empty. Never waits."""
        most = MAX_OUTPUTS
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
        """Drop the queue, send nothing more, and wake all waiters."""
        self._closed = True
        self._waiting.clear()
        self._left.set()

    def _first(self, most: int) -> list[tuple[Output, Unsendable]]:
        """Return the oldest queued outputs, as many as fit in one message."""
        first: list[tuple[Output, Unsendable]] = []
        logprobs = 0
        for waiting in self._waiting.values():
            logprobs += _logprobs(waiting[0])
            if first and (logprobs > MAX_LOGPROBS or len(first) == most):
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

"""A process of a multi-process frontend, which reaches its siblings through the parent."""

import asyncio
import logging
import os
import select
import socket
import sys
from collections.abc import Callable
from typing import Final

from common.aio.ipc import FrameProtocol, Frames, PendingCalls, frame
from common.aio.processes import StopSignals, end_with_parent
from common.aio.supervised import note_failure
from common.errors import ConfigurationError
from common.transfer.arena import ArenaOffer, reap_orphans
from common.transfer.shared_arena import SharedArena
from frontend.processes.child import MEMBER
from frontend.processes.listeners import ConnectionCounts
from frontend.processes.messages import (
    ANSWER_S,
    MAX_BYTES,
    Answered,
    Answers,
    Ask,
    Asked,
    Assigned,
    Attached,
    FromParent,
    Plan,
    Serving,
    Stop,
)

logger = logging.getLogger(__name__)

_MAX_DESCRIPTORS: Final = 64

_END_S: Final = 2.0
"""Time for a killed parent to end."""

Tell = Callable[[bytes], bytes]
"""Maps the argument of a question to its answer."""


class Siblings:
    """The other processes, and this one's shared resources. ``count`` includes this process;
    ``alone`` if no other listens yet.
    """

    def __init__(self, name: str, processes: int, end: socket.socket) -> None:
        """Use :meth:`join`."""
        self.name = name
        self.count = processes
        self.listeners: list[socket.socket] = []
        self.arena: SharedArena | None = None
        self.alone = False
        self._end = end
        self._counts: ConnectionCounts | None = None
        self._parent: FrameProtocol[FromParent] | None = None
        self._tells: dict[str, Tell] = {}
        self._questions: PendingCalls[Answers] = PendingCalls()
        self._answering: set[asyncio.Task[None]] = set()
        self._signals: StopSignals | None = None
        self._lost = False
        self._parent_pid = os.getppid()

    @classmethod
    def join(cls) -> "Siblings | None":
        """Return this process's place among several, or None. Exits if its parent is gone."""
        if MEMBER not in os.environ:
            return None
        parent, index, processes, descriptor = os.environ.pop(MEMBER).split()
        if int(parent) != os.getppid():
            sys.exit(1)
        os.set_inheritable(int(descriptor), False)
        return cls(index, int(processes), socket.socket(fileno=int(descriptor)))

    def begin(self, plan: Plan) -> None:
        """Send the plan and block for the answer: not on an event loop. Raises ConfigurationError
        if the parent is gone or ending.
        """
        self._end.sendall(frame(plan))
        data, descriptors, _, _ = socket.recv_fds(
            self._end, 1 << 16, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        assigned = next(Frames[FromParent](FromParent).feed(data), None)
        if not isinstance(assigned, Assigned):  # its parent is gone or ending
            raise ConfigurationError("this process was not let in among the others")
        counting, *rest = descriptors
        self._counts = ConnectionCounts(counting, self.count)
        os.close(counting)
        sockets = [socket.socket(fileno=descriptor) for descriptor in rest]
        self.alone = assigned.alone
        if assigned.offer is not None:
            offer = ArenaOffer.model_validate_json(assigned.offer)
            self.arena = SharedArena(offer, sockets.pop(), processes=self.count)
        self.listeners = sockets

    async def attach(self, signals: StopSignals) -> None:
        """Listen to the parent from now on. A Stop acts like a signal."""
        self._signals = signals
        self._parent = FrameProtocol(FromParent, self._received, self._parent_lost)
        protocol = self._parent
        # The connection replaces the signal, which would be the second and mean at once.
        end_with_parent(None)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, self._end)
        protocol.send(Attached())

    def serving(self) -> None:
        if self._parent is not None:
            self._parent.send(Serving())

    def has(self, connections: int | None) -> None:
        """Publish the number of connections; None if this process accepts no more."""
        if self._counts is None:
            return
        if connections is None:
            self._counts.not_accepting(int(self.name))
        else:
            self._counts.set(int(self.name), connections)

    def another_has_fewer(self) -> bool:
        """Return whether another process had better take the next connection."""
        return self._counts is not None and self._counts.another_has_fewer(int(self.name))

    def tell(self, topic: str, tell: Tell) -> None:
        self._tells[topic] = tell

    async def ask(self, topic: str, argument: bytes = b"") -> dict[str, bytes]:
        """Return the answers of the other processes and the parent that arrive in time, by
        process.
        """
        parent = self._parent
        if parent is None or self._lost:
            return {}

        async def send(number: int) -> None:
            parent.send(Ask(number, topic, argument))

        try:
            async with asyncio.timeout(2 * ANSWER_S):
                got = await self._questions.ask(send)
        except TimeoutError:
            logger.warning("the parent did not answer about %s; this process answers alone", topic)
            return {}
        if got.silent:
            logger.warning("%d processes did not answer about %s in time", got.silent, topic)
        return got.told

    def close(self) -> None:
        """Leave. If the parent was killed, remove its leftovers."""
        if self._parent is not None:
            self._parent.close()
        for listener in self.listeners:
            listener.close()
        if self._lost:
            _wait_for_end(self._parent_pid)
            reap_orphans()

    def _received(self, message: FromParent) -> None:
        match message:
            case Asked(number, topic, argument):
                task = asyncio.create_task(self._answer(number, topic, argument))
                self._answering.add(task)
                task.add_done_callback(self._answered)
            case Answers(number):
                self._questions.answered(number, message)
            case Stop(at_once):
                self._stop(at_once=at_once)

    async def _answer(self, number: int, topic: str, argument: bytes) -> None:
        tell = self._tells.get(topic)
        body = None if tell is None else tell(argument)
        if body is not None and len(body) > MAX_BYTES:
            logger.warning("%d bytes about %s are too many for other processes", len(body), topic)
            body = None
        if self._parent is not None:
            self._parent.send(Answered(number, body))

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        note_failure("answer_sibling", task)

    def _stop(self, *, at_once: bool) -> None:
        if self._signals is None:
            return
        if at_once:
            self._signals.interrupt()
        elif not self._signals.is_asked:
            self._signals.terminate()

    def _parent_lost(self) -> None:
        self._lost = True
        self._stop(at_once=False)


def _wait_for_end(pid: int) -> None:
    """Wait: a killed process counts as alive for a moment after its connections close."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # that pid is gone
        return
    try:
        select.select([descriptor], [], [], _END_S)
    finally:
        os.close(descriptor)

"""Process that reads from frontends over NIXL, into memory that a worker maps too.

 python -m common.transfer.nixl_processes.reader ...

If a network can reach it, the worker copies the data out and checks the copy. So writes of an
attacker change nothing: at most they kill this process, which is restarted.
"""

import mmap
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from common.errors import ArenaUnavailableError, ConfigurationError
from common.transfer import pages
from common.transfer.nixl_processes.agent import NixlAgent, NixlRead
from common.transfer.nixl_processes.child import (
    Start,
    begin,
    confine,
    no_more_processes,
    orphaned,
    wait,
)
from common.transfer.nixl_processes.messages import (
    Channel,
    Connect,
    Disconnect,
    Done,
    FromReader,
    NixlFailed,
    NixlPing,
    NixlPong,
    Read,
    Reading,
    ToReader,
    Unusable,
)

_SPIN_SECONDS: Final = 2e-3
_MAX_PAUSE_S: Final = 1e-3
_OVERDUE_AFTER: Final = 5.0
_OVERDUE_PAUSE: Final = 0.05
_IDLE_PAUSE: Final = 1.0

_PIECES_AT_ONCE: Final = 8
"""On their way of one read where they take a while. Copies between processes are done when they
begin, so there it is one."""


def pause(age: float) -> float:
    """Return the seconds until the next poll, given the age of the youngest piece. Proportional: a
    short transfer waits little, and a long one does not take a core from its server."""
    if age < _SPIN_SECONDS:
        return 0.0
    return min(age / 8, _MAX_PAUSE_S) if age < _OVERDUE_AFTER else _OVERDUE_PAUSE


@dataclass(eq=False)
class _Transfer:
    """A read in pieces.

    Attributes:
        began: start time of the last piece.
        posted: bytes of started pieces.
        pieces: in flight, in order.
        failure: why no more are started.
    """

    wanted: Read
    began: float
    posted: int = 0
    pieces: deque[NixlRead] = field(default_factory=deque)
    failure: str = ""


class Reader:
    """Executes reads over one agent."""

    def __init__(
        self, agent: NixlAgent, channel: Channel[FromReader, ToReader], address: int
    ) -> None:
        self._agent = agent
        self._channel = channel
        self._address = address
        self._transfers: list[_Transfer] = []

    def run(self, start: Start) -> None:
        """Read until the parent is gone. Raises EOFError or OSError: the worker is gone."""
        while not orphaned(start):
            if wait(self._channel.fileno(), self._pause()):
                self.handle(self._channel.receive())
            self.advance()

    def advance(self) -> None:
        for transfer in list(self._transfers):
            self._look_at(transfer)

    def _pause(self) -> float:
        if not self._transfers:
            return _IDLE_PAUSE
        return pause(time.monotonic() - max(each.began for each in self._transfers))

    def handle(self, message: ToReader) -> None:
        match message:
            case Connect(number, _, metadata):
                try:
                    self._agent.connect(metadata)
                except ArenaUnavailableError as error:
                    self._channel.send(NixlFailed(number, str(error)))
                else:
                    self._channel.send(Done(number))
            case Read():
                self._transfers.append(_Transfer(message, time.monotonic()))
            case NixlPing():
                self._channel.send(NixlPong())
            case Disconnect(agent):
                try:
                    self._agent.disconnect(agent)
                except ArenaUnavailableError:
                    return  # it never was connected

    def _look_at(self, transfer: _Transfer) -> None:
        """Report arrived pieces in order, and start the next one."""
        pieces, wanted = transfer.pieces, transfer.wanted
        try:
            while pieces and pieces[0].poll():
                pieces.popleft()
                if not transfer.failure:
                    self._channel.send(Done(wanted.number))
        except ArenaUnavailableError as error:
            pieces.popleft()
            transfer.failure = str(error)
        more = not transfer.failure and transfer.posted < wanted.size
        if more and len(pieces) < _PIECES_AT_ONCE:
            self._begin_piece(transfer)
        elif not more and not pieces:  # until then a failed read may be written to
            self._transfers.remove(transfer)
            if transfer.failure:
                self._channel.send(NixlFailed(wanted.number, transfer.failure))

    def _begin_piece(self, transfer: _Transfer) -> None:
        wanted, start = transfer.wanted, transfer.posted
        size = min(wanted.piece, wanted.size - start)
        local = self._address + wanted.offset + start
        try:
            piece = self._agent.read(wanted.agent, local, wanted.remote + start, size)
        except ArenaUnavailableError as error:
            transfer.failure = str(error)
        else:
            transfer.pieces.append(piece)
            transfer.posted += size
            transfer.began = time.monotonic()


def main() -> None:
    """Read until the parent is gone, or closes its end."""
    start = Start.parse(sys.argv[1])
    begin(start)
    # A busy worker hears of pieces later; no reason to end.
    channel: Channel[FromReader, ToReader] = Channel(start.socket(), ToReader, waits_to_send=True)
    confine(start)
    try:
        agent = NixlAgent("worker", start.error_handling)
        memory = mmap.mmap(start.memory, start.size)
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        agent.register(address, start.size)
        pages.populate(memoryview(memory), for_writing=True)
    except (ConfigurationError, ArenaUnavailableError, OSError) as error:
        channel.send(Unusable(str(error)))
        return
    os.close(start.memory)
    no_more_processes()
    channel.send(Reading())
    try:
        Reader(agent, channel, address).run(start)
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()

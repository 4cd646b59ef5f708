"""The process that reads from frontends over NIXL, into memory that a worker maps too.

    python -m common.transfer.nixl_processes.reader ...

Where a network can be reached the worker copies out what came and checks the copy, so what somebody
writes to this process over it changes nothing: at most it ends this process, and another one is
started.
"""

import mmap
import os
import sys
import time
from dataclasses import dataclass
from typing import Final

import msgspec
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
_LONGEST_PAUSE: Final = 1e-3
_OVERDUE_AFTER: Final = 5.0
_OVERDUE_PAUSE: Final = 0.05
_IDLE_PAUSE: Final = 1.0


def pause(age: float) -> float:
    """How long to wait before transfers are looked at again.

    Proportional to how long they already take, so that neither a short one waits noticeably
    longer than it must nor a long one takes a core from whoever serves it.

    Args:
        age: seconds since the youngest of them began.
    """
    if age < _SPIN_SECONDS:
        return 0.0
    return min(age / 8, _LONGEST_PAUSE) if age < _OVERDUE_AFTER else _OVERDUE_PAUSE


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A piece on its way.

    Attributes:
        wanted: the piece and all that follows it.
    """

    wanted: Read
    read: NixlRead
    began: float


class _Reader:
    def __init__(
        self, agent: NixlAgent, channel: Channel[FromReader, ToReader], address: int
    ) -> None:
        self._agent = agent
        self._channel = channel
        self._address = address
        self._transfers: list[_Transfer] = []

    def run(self, start: Start) -> None:
        """Read until nobody wants it any more.

        Raises:
            EOFError: the worker is gone.
            OSError: likewise.
        """
        while not orphaned(start):
            if wait(self._channel.fileno(), self._pause()):
                self._handle(self._channel.receive())
            for transfer in list(self._transfers):
                self._look_at(transfer)

    def _pause(self) -> float:
        if not self._transfers:
            return _IDLE_PAUSE
        return pause(time.monotonic() - self._transfers[-1].began)

    def _handle(self, message: ToReader) -> None:
        match message:
            case Connect(number, _, metadata):
                try:
                    self._agent.connect(metadata)
                except ArenaUnavailableError as error:
                    self._channel.send(NixlFailed(number, str(error)))
                else:
                    self._channel.send(Done(number))
            case Read():
                self._begin(message)
            case NixlPing():
                self._channel.send(NixlPong())
            case Disconnect(agent):
                try:
                    self._agent.disconnect(agent)
                except ArenaUnavailableError:
                    return  # it never was connected

    def _begin(self, wanted: Read) -> None:
        """Begin to read the first piece of what is wanted."""
        size = min(wanted.size, wanted.piece)
        try:
            read = self._agent.read(
                wanted.agent, self._address + wanted.offset, wanted.remote, size
            )
        except ArenaUnavailableError as error:
            self._channel.send(NixlFailed(wanted.number, str(error)))
        else:
            self._transfers.append(_Transfer(wanted, read, time.monotonic()))

    def _look_at(self, transfer: _Transfer) -> None:
        wanted = transfer.wanted
        try:
            if not transfer.read.poll():
                return
            answer: Done | NixlFailed = Done(wanted.number)
        except ArenaUnavailableError as error:
            answer = NixlFailed(wanted.number, str(error))
        self._transfers.remove(transfer)
        # First, so that the worker checks this piece while the next one is read.
        self._channel.send(answer)
        if isinstance(answer, Done) and wanted.size > wanted.piece:
            self._begin(_after_first_piece(wanted))


def _after_first_piece(wanted: Read) -> Read:
    return msgspec.structs.replace(
        wanted,
        remote=wanted.remote + wanted.piece,
        offset=wanted.offset + wanted.piece,
        size=wanted.size - wanted.piece,
    )


def main() -> None:
    """Read until the process that started this one is gone, or closes its end."""
    start = Start.parse(sys.argv[1:])
    begin(start)
    # A worker that is busy hears of pieces later; no reason to end.
    channel: Channel[FromReader, ToReader] = Channel(
        start.socket(), ToReader, waits_to_send=True
    )
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
        _Reader(agent, channel, address).run(start)
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()

"""Process that serves the arena over NIXL, and holds nothing else.

 python -m common.transfer.nixl_processes.server ...

It maps the arena read-only, so writes of an attacker change nothing: at most they kill this
process, which is restarted. For devices that register only writable memory, it gets an arena that
no other process reads.
"""

import mmap
import os
import sys
import time
from typing import Final

import numpy as np

from common.errors import ArenaUnavailableError, ConfigurationError
from common.transfer import pages
from common.transfer.nixl_processes.agent import NixlAgent
from common.transfer.nixl_processes.child import (
    Start,
    begin,
    confine,
    listeners,
    listens,
    no_more_processes,
    orphaned,
    wait,
)
from common.transfer.nixl_processes.messages import (
    Channel,
    FromServer,
    Leased,
    NixlPong,
    Serving,
    ToServer,
    Unusable,
)

_IDLE_PAUSE: Final = 0.02
_LENDING_PAUSE: Final = 0.001
_LISTENER_POLL_S: Final = 1.0


def main() -> None:
    """Serve until the parent is gone, or closes its end."""
    start = Start.parse(sys.argv[1])
    begin(start)
    channel: Channel[FromServer, ToServer] = Channel(start.socket(), ToServer)
    confine(start)
    try:
        agent = NixlAgent("frontend", start.error_handling)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if start.writable else 0)
        memory = mmap.mmap(start.memory, start.size, prot=prot)
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        agent.register(address, start.size)
        pages.populate(memoryview(memory), for_writing=False)
    except (ConfigurationError, ArenaUnavailableError, OSError) as error:
        channel.send(Unusable(str(error)))
        return
    os.close(start.memory)
    no_more_processes()
    channel.send(Serving(agent.name, agent.metadata(), address))
    try:
        _serve(agent, channel, start)
    except (EOFError, OSError):
        return


def _serve(agent: NixlAgent, channel: Channel[FromServer, ToServer], start: Start) -> None:
    """Make progress on peers' reads. Over RDMA or within a host a READ needs that only to connect.
    Over TCP this process sends the bytes itself, so it polls often while reads are expected."""
    pause = _IDLE_PAUSE
    ours, looked = listeners(), time.monotonic()
    while not orphaned(start):
        if time.monotonic() - looked > _LISTENER_POLL_S:
            looked = time.monotonic()
            if not all(listens(each) for each in ours):
                return  # no peer could connect any more; another process follows
        if wait(channel.fileno(), pause):
            message = channel.receive()
            if isinstance(message, Leased):
                pause = _LENDING_PAUSE if message.active else _IDLE_PAUSE
            else:
                channel.send(NixlPong())
        agent.progress()


if __name__ == "__main__":
    main()

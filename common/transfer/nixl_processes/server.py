"""The process that serves the arena over NIXL, and holds nothing else.

    python -m common.transfer.nixl_processes.server ...

It maps the arena for reading only, so what somebody writes to it over the network changes
nothing: at most it ends this process, and another one is started. Where devices register no memory
but what can be written, it gets an arena that nobody else reads.
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
_LOOK_AT_LISTENERS: Final = 1.0


def main() -> None:
    """Serve until the process that started this one is gone, or closes its end."""
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
    """Move what others read from us.

    Over RDMA or within a host a READ needs that for connecting only. Over TCP this process
    sends the bytes itself, so it looks often while somebody is about to read.
    """
    pause = _IDLE_PAUSE
    ours, looked = listeners(), time.monotonic()
    while not orphaned(start):
        if time.monotonic() - looked > _LOOK_AT_LISTENERS:
            looked = time.monotonic()
            if not all(listens(each) for each in ours):
                return  # nobody could connect any more; another process follows
        if wait(channel.fileno(), pause):
            message = channel.receive()
            if isinstance(message, Leased):
                pause = _LENDING_PAUSE if message.active else _IDLE_PAUSE
            else:
                channel.send(NixlPong())
        agent.progress()


if __name__ == "__main__":
    main()

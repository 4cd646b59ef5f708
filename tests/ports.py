"""Ports for servers that tests start."""

import random
import socket
from itertools import cycle

_FIRST, _AFTER_LAST = 10_000, 32_000
_START = random.randrange(_FIRST, _AFTER_LAST)  # elsewhere than another run of the tests
_ports = cycle([*range(_START, _AFTER_LAST), *range(_FIRST, _START)])


def free_port() -> int:
    """A port of loopback that is free, each time another. It is below those that the kernel gives
    to whoever asks for any, so it stays free until a server that was just started binds it.
    """
    while True:
        port = next(_ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port

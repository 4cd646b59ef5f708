"""A fork has nothing of its parent's that others wait for."""

import socket
from pathlib import Path

from frontend.bounded.forks import Bounds, forked

BOUNDS = Bounds(cpu_s=10, memory_bytes=1 << 30, alarm_s=60)


def open_files(_: object) -> bytes:
    """Return the open file descriptors, as text."""
    return " ".join(each.name for each in Path("/proc/self/fd").iterdir()).encode()


def test_a_fork_holds_no_connection_of_its_parent() -> None:
    ours, others = socket.socketpair()
    with ours, others:
        found = {int(each) for each in forked(None, open_files, BOUNDS).split()}
        assert not {ours.fileno(), others.fileno()} & found
        # Its answer's pipe, and the folder that it lists.
        assert len(found - {0, 1, 2}) <= 2


def test_a_fork_that_fails_answers_nothing() -> None:
    assert forked(None, lambda _: bytes(1 << 40), BOUNDS) == b""

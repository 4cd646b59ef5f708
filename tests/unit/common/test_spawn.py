"""A child process with one end of a socket pair, from its start to its end; what one has loaded."""

import gc
import os
import signal
import socket
import sys
import weakref
from pathlib import Path

import pytest

from common.aio.processes import ForkedProcess, SpawnedProcess, freeze_heap

ECHO = "import socket,sys; s=socket.socket(fileno=int(sys.argv[1])); s.sendall(s.recv(9)*2)"


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_it_is_spoken_to_and_seen_to_end() -> None:
    process = SpawnedProcess(lambda end: python(ECHO, str(end)))
    process.socket.sendall(b"ab")
    assert process.socket.recv(9) == b"abab"
    assert process.socket.recv(9) == b"", "its end is its own alone"
    assert process.reap(60) == 0 and not process.alive
    assert process.end(60) == 0
    assert process.socket.fileno() == -1


def test_one_that_does_not_end_is_killed() -> None:
    process = SpawnedProcess(lambda _: ["sleep", "1000"], socket.SOCK_SEQPACKET)
    assert process.alive and process.reap(0.0) is None
    assert process.end(60) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_it_inherits_what_it_is_given_and_nothing_else() -> None:
    reader, writer = os.pipe()
    code = "import os,sys; os.write(int(sys.argv[1]), b'%d' % os.getpid()); print('here')"
    try:
        process = SpawnedProcess(
            lambda _: python(code, str(writer)), descriptors=[writer], cwd="/", only_stderr=True
        )
        assert int(os.read(reader, 99)) == process.pid
        assert process.end(60) in (0, -signal.SIGKILL)
    finally:
        os.close(reader)
        os.close(writer)


def test_descriptors_that_a_fork_does_not_keep_keep_their_numbers() -> None:
    """libuv closes its own in each child of a child, whatever has got their numbers."""
    reader, writer = os.pipe()

    def run(end: socket.socket) -> None:
        end.sendall(str(Path(f"/proc/self/fd/{writer}").readlink()).encode())
        end.recv(1)

    process = ForkedProcess(run, socket.SOCK_STREAM)
    os.close(writer)
    assert process.socket.recv(99) == os.devnull.encode()
    assert os.read(reader, 1) == b"", "it is closed there"
    os.close(reader)
    process.socket.sendall(b"x")
    assert process.reap(60) == process.end(60) == 0


def test_one_that_can_not_be_started_leaves_no_descriptor() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="no/such"):
        SpawnedProcess(lambda _: ["/no/such/program"])
    assert set(Path("/proc/self/fd").iterdir()) == before


class Body:
    """Garbage that only a collection frees, once it has no other reference."""

    def __init__(self) -> None:
        self.itself = self


def test_old_garbage_is_collected_after_a_freeze_of_many_objects() -> None:
    """Python waited for a quarter as many new ones, and bodies stayed until memory was full."""
    loaded = [[each] for each in range(1_000_000)]
    freeze_heap()
    body = Body()
    gc.collect(1)  # makes it old
    garbage = weakref.ref(body)
    del body
    new = [[each] for each in range(100_000)]
    assert garbage() is None
    assert (len(loaded), len(new)) == (1_000_000, 100_000)

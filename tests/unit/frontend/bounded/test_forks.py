"""A fork has nothing of its parent's that others wait for."""

import os
import socket
import threading
from pathlib import Path

import pytest

from frontend.bounded import forks
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


def test_a_fork_that_waits_for_a_lock_of_its_parents_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread held it during the fork, and no thread of the child releases it."""
    monkeypatch.setattr(forks, "POLL_INTERVAL_S", 0.05)
    fork, lock, children = os.fork, threading.Lock(), []
    lock.acquire()

    def fork_and_release() -> int:
        if pid := fork():
            children.append(pid)
            if lock.locked():
                lock.release()
        return pid

    def answer(_: None) -> bytes:
        with lock:
            return b"answer"

    monkeypatch.setattr(os, "fork", fork_and_release)
    assert forked(None, answer, BOUNDS) == b"answer"
    assert len(children) == 2

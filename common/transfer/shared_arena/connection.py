"""A process's connection to its arena's keeper. Thread-safe, and never blocks an event loop: a
thread sends the backlog, another one receives."""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from itertools import count
from typing import Final

import msgspec

from common.aio.ipc import Frames, frame
from common.errors import ArenaUnavailableError
from common.transfer.shared_arena.messages import (
    Answer,
    Forget,
    FromKeeper,
    GiveBack,
    Recall,
)

_LOST = "the process that keeps the arena is gone"
_SILENT = "the process that keeps the arena does not answer"
_READ = 1 << 16

ANSWER_S: Final = 5.0
"""Silence after which the keeper is asked whether it answers at all, and again after which it is
taken for stopped. An answer may take longer: for as long as another process writes an item."""

_POLL_INTERVAL_S: Final = 1.0
_PROBE: Final = Recall(0, b"", b"")  # answered at once; no call has the number


class KeeperConnection:
    """Calls to the keeper, answered in any order. While the keeper is silent all calls fail: its
    first answer ends that."""

    def __init__(
        self,
        end: socket.socket,
        on_order: Callable[[GiveBack | Forget], None],
        on_unwanted: Callable[[Answer], None],
    ) -> None:
        """Take ownership of a socket. On the receiving thread, ``on_order`` gets the keeper's
        orders, and ``on_unwanted`` answers without a waiter."""
        self._socket = end
        self._on_order = on_order
        self._on_unwanted = on_unwanted
        self._numbers = count(1)
        self._waiting: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._has_backlog = threading.Condition(self._lock)
        self._lost = False
        self._silent = False
        self._heard = time.monotonic()
        self._probed: float | None = None
        self._threads = [
            threading.Thread(target=self._read, name="arena-answers", daemon=True),
            threading.Thread(target=self._write, name="arena-backlog", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def lost(self) -> bool:
        return self._lost

    def ask(self, question: Callable[[int], msgspec.Struct]) -> "Future[Answer]":
        """Send a call made for a number. The future raises ArenaUnavailableError if the keeper is
        lost or silent."""
        number = next(self._numbers)
        answer: Future[Answer] = Future()
        with self._lock:
            if not self._lost and not self._silent:
                self._waiting[number] = answer
                self._send(frame(question(number)))
                return answer
        answer.set_exception(ArenaUnavailableError(_LOST if self._lost else _SILENT))
        return answer

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message without an answer. A lost keeper has freed all leases anyway."""
        data = frame(message)
        with self._lock:
            self._send(data)

    def close(self) -> None:
        """Close this end: the keeper takes back all leases."""
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._socket.close()

    def _send(self, data: bytes) -> None:
        if self._lost:
            return
        sent = 0
        if not self._backlog:
            try:
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the reading thread sees it too
        if sent < len(data):
            self._backlog.append(data[sent:])
            self._has_backlog.notify()

    def _write(self) -> None:
        """Send the backlog while the keeper reads slowly, and fail calls once it is silent."""
        while True:
            with self._lock:
                self._has_backlog.wait_for(lambda: self._backlog or self._lost, _POLL_INTERVAL_S)
                if self._lost:
                    return
                unanswered = self._unanswered()
                backlog = bool(self._backlog)
            _fail(unanswered, _SILENT)
            if not backlog:
                continue
            select.select([], [self._socket], [], 1.0)
            with self._lock:
                if not self._backlog:
                    continue  # the reading thread has seen the end
                data = self._backlog[0]
                try:
                    sent = self._socket.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError:
                    self._backlog.clear()
                    continue  # the reading thread sees it too
                if sent < len(data):
                    self._backlog[0] = data[sent:]
                else:
                    self._backlog.popleft()

    def _read(self) -> None:
        frames: Frames[FromKeeper] = Frames(FromKeeper)
        try:
            while data := self._socket.recv(_READ):
                for message in frames.feed(data):
                    self._take(message)
        except (OSError, msgspec.MsgspecError):
            pass  # like EOF: no more answers
        with self._lock:
            self._lost = True
            self._backlog.clear()
            self._has_backlog.notify()
            waiting, self._waiting = self._waiting, {}
        _fail(waiting.values(), _LOST)

    def _unanswered(self) -> Collection["Future[Answer]"]:
        """Return the calls of a keeper that turned out to be silent; probe it before."""
        now = time.monotonic()
        if not self._waiting:
            self._heard, self._probed = now, None
        elif self._probed is not None:
            if now - self._probed > ANSWER_S:
                waiting, self._waiting = self._waiting, {}
                self._silent = True
                return waiting.values()
        elif now - self._heard > ANSWER_S:
            self._probed = now
            self._send(frame(_PROBE))
        return ()

    def _take(self, message: FromKeeper) -> None:
        self._silent, self._heard, self._probed = False, time.monotonic(), None
        if isinstance(message, GiveBack | Forget):
            self._on_order(message)
            return
        with self._lock:
            answer = self._waiting.pop(message.number, None)
        if answer is not None and answer.set_running_or_notify_cancel():
            answer.set_result(message)
        else:
            self._on_unwanted(message)


def _fail(calls: Collection["Future[Answer]"], reason: str) -> None:
    for answer in calls:
        if answer.set_running_or_notify_cancel():
            answer.set_exception(ArenaUnavailableError(reason))

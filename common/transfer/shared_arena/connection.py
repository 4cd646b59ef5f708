"""A process's connection to its arena's keeper. Thread-safe, and never blocks an event loop: a
thread sends the backlog, another one receives."""

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count

import msgspec

from common.aio.ipc import Frames, frame
from common.errors import ArenaUnavailableError
from common.transfer.shared_arena.messages import Answer, Forget, FromKeeper, GiveBack

_LOST = "the process that keeps the arena is gone"
_READ = 1 << 16


class KeeperConnection:
    """Calls to the keeper, answered in any order."""

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
        """Send a call made for a number. The future raises ArenaUnavailableError if it is lost."""
        number = next(self._numbers)
        answer: Future[Answer] = Future()
        with self._lock:
            if not self._lost:
                self._waiting[number] = answer
                self._send(frame(question(number)))
                return answer
        answer.set_exception(ArenaUnavailableError(_LOST))
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
        """Send the backlog while the keeper reads slowly."""
        while True:
            with self._lock:
                while not self._backlog and not self._lost:
                    self._has_backlog.wait()
                if self._lost:
                    return
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
        for answer in waiting.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(ArenaUnavailableError(_LOST))

    def _take(self, message: FromKeeper) -> None:
        if isinstance(message, GiveBack | Forget):
            self._on_order(message)
            return
        with self._lock:
            answer = self._waiting.pop(message.number, None)
        if answer is not None and answer.set_running_or_notify_cancel():
            answer.set_result(message)
        else:
            self._on_unwanted(message)

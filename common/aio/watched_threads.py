"""Thread pool that replaces a thread whose call does not return in time.

Only that call fails. Python can't end a thread, so a stuck one stays; the owner of the process
limits their number, see :data:`common.observability.watchdog.WATCHDOG`.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from common.errors import ThreadStuckError
from common.observability.log_lines import current_request
from common.observability.watchdog import STALL_S, WATCHDOG

P = ParamSpec("P")
T = TypeVar("T")

STOP_S: Final = 5.0  # seconds that :meth:`WatchedThreads.shutdown` waits at most


@dataclass(frozen=True)
class _Task:
    """A queued or running call; ``request`` is its request's id."""

    future: "Future[Any]"
    work: Callable[[], object]
    request: str


class WatchedThreads(Executor):
    """``ThreadPoolExecutor`` with a time limit for each call. Threads are daemons, so a stuck one
    does not keep the process from exiting."""

    def __init__(self, name: str, count: int, limit_s: float, stall_s: float = STALL_S) -> None:
        """
        Args:
            name: in thread names, metrics and log lines: a short constant.
            count: maximum threads, stuck ones excluded.
            limit_s: seconds per call, plus extensions by
                :func:`common.observability.watchdog.allow`.
            stall_s: seconds after which a call is logged.
        """
        self._name = name
        self._count = count
        self._limit_s = limit_s
        self._stall_s = stall_s
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._changing = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Run a function in a thread. Its future may raise ThreadStuckError. Raises RuntimeError:
        the pool was shut down."""
        future: Future[T] = Future()
        with self._changing:
            if self._closed:
                raise RuntimeError(f"the {self._name} threads were shut down")
            if len(self._threads) < self._count:
                try:
                    self._start()
                except RuntimeError:  # no thread is to be had now
                    if not self._threads:
                        raise
            self._tasks.put(_Task(future, partial(fn, *args, **kwargs), current_request.get()))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once idle; wait for running calls, ``STOP_S`` seconds at most."""
        with self._changing:
            threads = set() if self._closed else set(self._threads)
            self._closed = True
            if cancel_futures:
                self._cancel()
            for _ in threads:
                self._tasks.put(None)
        deadline = time.monotonic() + STOP_S
        for thread in threads if wait else ():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name} thread", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _cancel(self) -> None:
        try:
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    task.future.cancel()
        except Empty:
            return

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            if task.future.set_running_or_notify_cancel() and not self._run(task):
                return  # another thread has taken the place of this one
            del task  # or it would keep its data alive until the next task

    def _run(self, task: _Task) -> bool:
        """Run a task; return False if it was given up meanwhile."""
        current_request.set(task.request)
        give_up = partial(self._replace, threading.current_thread(), task)
        call = WATCHDOG.begin(self._name, self._limit_s, give_up, self._stall_s)
        try:
            result = task.work()
        except BaseException as error:  # noqa: BLE001 # raised where the future is waited for
            in_time = WATCHDOG.end(call)
            if in_time:
                task.future.set_exception(error)
            # The error's traceback refers to this frame, and would keep its locals alive.
            del task, give_up, call
            return in_time
        in_time = WATCHDOG.end(call)
        if in_time:
            task.future.set_result(result)
        return in_time

    def _replace(self, thread: threading.Thread, task: _Task) -> None:
        """Fail a task whose thread does not return, and start another thread."""
        with self._changing:
            self._threads.discard(thread)
            if not self._closed:
                with suppress(
                    RuntimeError
                ):  # no thread is to be had now: the next task tries again
                    self._start()
        task.future.set_exception(ThreadStuckError(self._name))

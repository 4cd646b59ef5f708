"""Watch threads and the event loop: log and count slow calls, give up calls that never return. One
thread checks all watched calls of the process, and runs only while there are some."""

import asyncio
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from common.observability.log_lines import current_request
from common.observability.telemetry import (
    EVENT_LOOP_DELAY,
    EVENT_LOOP_STALLS,
    STUCK_THREADS,
    THREAD_STALLS,
    THREADS_REPLACED,
)

logger = logging.getLogger(__name__)

STALL_S: Final = 1.0  # seconds until a call is logged, plus its allowance for pixels

INTERVAL_S: Final = 0.25
MAX_FRAMES: Final = 12

MAX_STUCK: Final = 16
"""Stuck threads with which a process goes on. Each has its memory, and may keep a core busy."""

_running: Final = threading.local()


class WatchedCall:
    """A call on a thread; it is lost once the watchdog has given it up."""

    def __init__(
        self, threads: str, limit_s: float, stall_s: float, give_up: Callable[[], None] | None
    ) -> None:
        self.threads = threads
        self.lost = False
        self._limit_s = limit_s
        self._stall_s = stall_s
        self._give_up = give_up
        self._told = False
        self._request = current_request.get() or "(none)"
        self._thread = threading.get_ident()
        self._began = time.monotonic()

    def extend(self, seconds: float) -> None:
        self._limit_s += seconds
        self._stall_s += seconds

    def look(self) -> bool:
        """Log the call if it is slow; return whether its time is over."""
        taken = time.monotonic() - self._began
        if not self._told and taken > self._stall_s:
            self._told = True
            THREAD_STALLS.labels(self.threads).inc()
            logger.warning(
                "request %s keeps a %s thread for %.1f s: %s",
                self._request,
                self.threads,
                taken,
                self._where(),
            )
        return self._give_up is not None and taken > self._limit_s

    def give_up(self, stuck: int) -> None:
        """Let the thread's owner replace it. Called once, in the watchdog's thread."""
        assert self._give_up is not None, "only calls with an end are given up"
        THREADS_REPLACED.labels(self.threads).inc()
        STUCK_THREADS.labels(self.threads).inc()
        logger.error(
            "request %s: a %s thread did not return in %.1f s, so the request fails and another "
            "thread takes its place. Threads that are stuck: %d. It is at: %s",
            self._request,
            self.threads,
            self._limit_s,
            stuck,
            self._where(),
        )
        self._give_up()

    def came_back(self) -> None:
        """Note that the call returned after it was given up."""
        STUCK_THREADS.labels(self.threads).dec()
        logger.warning(
            "request %s: a %s thread returned after %.1f s, too late",
            self._request,
            self.threads,
            time.monotonic() - self._began,
        )

    def _where(self) -> str:
        return stack_of(sys._current_frames().get(self._thread))


class ThreadWatchdog:
    """The watchdog of a process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[WatchedCall] = set()
        self._stuck = 0
        self._thread: threading.Thread | None = None

    @property
    def stuck(self) -> int:
        """Threads that were given up and have not returned."""
        return self._stuck

    @property
    def busy(self) -> int:
        """Threads in a call, stuck ones included."""
        with self._changed:
            return len(self._calls) + self._stuck

    async def too_many_stuck(self) -> None:
        """Return once more than ``MAX_STUCK`` threads are stuck."""
        while self._stuck <= MAX_STUCK:  # noqa: ASYNC110 # the threads know of no event loop
            await asyncio.sleep(INTERVAL_S)

    def begin(
        self,
        threads: str,
        limit_s: float,
        give_up: Callable[[], None] | None = None,
        stall_s: float = STALL_S,
    ) -> WatchedCall:
        """Watch this thread's call until :meth:`end`.

        Args:
            threads: name in metrics and log lines: a short constant.
            limit_s: seconds until the call is given up.
            give_up: replaces the thread, in another thread; None to log only.
            stall_s: seconds until the call is logged.
        """
        call = WatchedCall(threads, limit_s, stall_s, give_up)
        _running.call = call
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="thread watchdog", daemon=True
                )
                self._thread.start()
            elif len(self._calls) == 1:
                self._changed.notify()
        return call

    def end(self, call: WatchedCall) -> bool:
        """Stop watching a call; return False if it was given up before."""
        _running.call = None
        with self._changed:
            self._calls.discard(call)
            if not call.lost:
                return True
            self._stuck -= 1
        call.came_back()
        return False

    @contextmanager
    def telling(self, threads: str) -> Iterator[None]:
        """Log this thread's work if it is slow, without a limit."""
        call = self.begin(threads, float("inf"))
        try:
            yield
        finally:
            self.end(call)

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    self._changed.wait()
            self._look()
            time.sleep(INTERVAL_S)

    def _look(self) -> None:
        """Check each call once. Apart from the loop, whose variables would keep calls alive."""
        with self._changed:
            calls = list(self._calls)
        for call in filter(WatchedCall.look, calls):
            self._give_up(call)

    def _give_up(self, call: WatchedCall) -> None:
        with self._changed:
            if call not in self._calls:
                return  # it has just returned
            self._calls.discard(call)
            call.lost = True
            self._stuck += 1
            stuck = self._stuck
        call.give_up(stuck)


WATCHDOG: Final = ThreadWatchdog()
"""Of this process. Its thread starts with the first call, so processes may fork before."""


def allow(seconds: float) -> None:
    """Extend the time limit of this thread's call, if it is watched."""
    call: WatchedCall | None = getattr(_running, "call", None)
    if call is not None:
        call.extend(seconds)


def stack_of(frame: FrameType | None) -> str:
    """Return a thread's stack, outermost first, on one line."""
    places: list[str] = []
    while frame is not None and len(places) < MAX_FRAMES:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " > ".join(reversed(places)) or "(it has ended)"


LOOP_INTERVAL_S: Final = 0.25
"""Polling interval. Longer stalls are always seen, shorter ones only sometimes."""


async def measure_loop_delay() -> None:
    """Observe the event loop's delay until cancelled."""
    while True:
        due = time.perf_counter() + LOOP_INTERVAL_S
        await asyncio.sleep(LOOP_INTERVAL_S)
        EVENT_LOOP_DELAY.observe(max(0.0, time.perf_counter() - due))


async def watch_for_stalls(stall_s: float = STALL_S) -> None:
    """Log and count longer stalls of the main thread's loop. Each turn resets a timer, whose signal
    handler runs in the context that blocks the loop: it knows the request, unlike a thread."""
    before = signal.signal(signal.SIGALRM, _tell)
    try:
        while True:
            signal.setitimer(signal.ITIMER_REAL, LOOP_INTERVAL_S + stall_s)
            await asyncio.sleep(LOOP_INTERVAL_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _tell(_: int, frame: FrameType | None) -> None:
    EVENT_LOOP_STALLS.inc()
    logger.warning(
        "the event loop stands still for %s, so requests wait: it is at %s",
        f"request {request}" if (request := current_request.get()) else "work of no request",
        stack_of(frame),
    )

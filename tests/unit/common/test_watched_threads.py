"""A thread that does not return is replaced, and only its call fails."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait

import pytest
from prometheus_client import REGISTRY

from common.aio.watched_threads import WatchedThreads
from common.errors import ThreadStuckError
from common.observability.log_lines import current_request
from common.observability.watchdog import WATCHDOG, WatchedCall, allow

NEVER = 1000.0


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(name, {"where": "test"}) or 0.0


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)


class Hung:
    """Calls that do not return before they are told.

    Attributes:
        is_late: they take more than they may.
    """

    def __init__(self) -> None:
        self.is_late = True
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)

    def __call__(self) -> str:
        self.begun.release()
        if self.is_late:
            allow(-2 * NEVER)
        self.go.wait()
        return "late"


@pytest.fixture
def hung() -> Iterator[Hung]:
    before = WATCHDOG.stuck
    hung = Hung()
    yield hung
    hung.go.set()
    until(lambda: WATCHDOG.stuck == before)


def test_calls_return_what_they_return_and_raise_what_they_raise() -> None:
    threads = WatchedThreads("test", 2, NEVER)
    assert threads.submit(lambda a, b: a - b, 3, b=1).result() == 2
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result()
    threads.shutdown()


def test_a_stuck_thread_is_replaced_and_only_its_call_fails(hung: Hung) -> None:
    threads = WatchedThreads("test", 1, NEVER)
    replaced, stuck = metric("mmrouter_threads_replaced_total"), WATCHDOG.stuck
    lost = threads.submit(hung)
    kept = threads.submit(threading.get_ident)
    with pytest.raises(ThreadStuckError, match=r"test thread .*\(--media-decode-timeout\)"):
        lost.result()
    assert kept.result(), "what waited behind it is done"
    assert WATCHDOG.stuck == stuck + 1
    assert metric("mmrouter_threads_replaced_total") == replaced + 1
    assert metric("mmrouter_stuck_threads") == 1
    hung.go.set()
    until(lambda: metric("mmrouter_stuck_threads") == 0)
    assert WATCHDOG.stuck == stuck
    assert isinstance(lost.exception(), ThreadStuckError), "a late result changes nothing"
    threads.shutdown()


def test_a_stuck_thread_that_returns_takes_no_more_calls(hung: Hung) -> None:
    threads = WatchedThreads("test", 1, NEVER)
    stuck: list[threading.Thread] = []

    def call() -> None:
        stuck.append(threading.current_thread())
        hung()

    with pytest.raises(ThreadStuckError):
        threads.submit(call).result()
    hung.go.set()
    stuck[0].join()
    assert threads.submit(threading.current_thread).result() is not stuck[0]
    threads.shutdown()


def test_twenty_that_hang_at_once_are_all_replaced(hung: Hung) -> None:
    threads = WatchedThreads("test", 8, NEVER)
    calls = [threads.submit(hung) for _ in range(20)]
    wait(calls)
    assert all(isinstance(call.exception(), ThreadStuckError) for call in calls)
    assert threads.submit(lambda: "done").result() == "done"
    threads.shutdown()


def test_who_leaves_while_its_call_hangs_leaves_a_thread_to_replace(hung: Hung) -> None:
    threads = WatchedThreads("test", 1, NEVER)
    lost = threads.submit(hung)
    hung.begun.acquire()
    assert not lost.cancel(), "it has begun"
    never = threads.submit(hung)
    assert never.cancel(), "it has not"
    assert threads.submit(lambda: "done").result() == "done"
    threads.shutdown()


def test_a_call_may_be_allowed_more_time() -> None:
    call = WatchedCall("test", -1.0, NEVER, lambda: None)
    assert call.look(), "its time is over"
    call.extend(NEVER)
    assert not call.look()


def test_the_request_and_the_place_are_told(hung: Hung, caplog: pytest.LogCaptureFixture) -> None:
    hung.is_late = False
    threads = WatchedThreads("test", 1, NEVER, stall_s=0.0)
    stalls = metric("mmrouter_thread_stalls_total")
    about = current_request.set("request-9")
    call = threads.submit(hung)
    current_request.reset(about)
    until(lambda: metric("mmrouter_thread_stalls_total") > stalls)
    hung.go.set()
    assert call.result() == "late"
    (line,) = [each for each in caplog.messages if "request-9" in each]
    assert "keeps a test thread" in line
    assert "__call__" in line and "test_watched_threads.py" in line
    threads.shutdown()


def test_nothing_of_a_call_is_kept_after_it() -> None:
    class Medium:
        pass

    threads = WatchedThreads("test", 1, NEVER)

    def work(medium: Medium, fail: bool) -> None:
        WATCHDOG._look()  # as its own thread may, at any time
        if fail:
            raise ValueError(str(medium))

    gc.disable()
    try:
        for fail in (False, True):
            medium = Medium()
            gone = weakref.ref(medium)
            call = threads.submit(work, medium, fail)
            assert (call.exception() is not None) is fail
            del call, medium
            until(lambda gone=gone: gone() is None)  # type: ignore[misc] # mypy infers no default
    finally:
        gc.enable()
    threads.shutdown()


def test_shutting_down_leaves_undone_what_has_not_begun(hung: Hung) -> None:
    threads = WatchedThreads("test", 1, NEVER)
    hung.is_late = False
    begun = threads.submit(hung)
    hung.begun.acquire()
    waiting = threads.submit(hung)
    threads.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    hung.go.set()
    assert begun.result() == "late"
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(hung)


EXITS = """
import threading
from common.aio.watched_threads import WatchedThreads
threads = WatchedThreads("test", 1, 0.0)
print(type(threads.submit(threading.Event().wait).exception()).__name__)
"""


def test_a_process_exits_though_a_thread_is_stuck() -> None:
    command = [sys.executable, "-c", EXITS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "ThreadStuckError\n"


def test_a_call_waits_for_a_thread_if_no_further_one_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    threads = WatchedThreads("test", 2, NEVER)
    try:
        with monkeypatch.context() as lacking:
            lacking.setattr(threading, "_start_new_thread", no_thread)
            with pytest.raises(RuntimeError):
                threads.submit(str)
        assert threads.submit(str).result() == ""
        monkeypatch.setattr(threading, "_start_new_thread", no_thread)
        assert threads.submit(str).result() == ""
    finally:
        threads.shutdown()

"""A child process for clients' work ends when nobody needs it, whatever it is doing."""

import os
import signal
import threading

import pytest

from common.aio.processes import python_command
from frontend.bounded.orders import TEMPLATE_BOUNDS, Order
from frontend.bounded.work import BoundedWork, Process

COMMAND = python_command("frontend.bounded.template_server")


async def test_a_process_that_starts_ends_too() -> None:
    starting, go_on = threading.Event(), threading.Event()

    def greeting() -> None:
        starting.set()
        go_on.wait()

    work = BoundedWork(COMMAND, "templates", 10, TEMPLATE_BOUNDS, greeting)
    work.start_soon()
    starting.wait()
    work.close()
    go_on.set()
    work._thread.shutdown()
    assert work.process is not None and not work.process.spawned.alive


async def test_one_that_was_closed_answers_nothing() -> None:
    work = BoundedWork(COMMAND, "templates", 10, TEMPLATE_BOUNDS)
    asking = work.ask(Order("{{ 1 }}", [], {}, {}))
    assert await asking is not None
    work.close()
    assert work.process is not None and not work.process.spawned.alive


async def test_a_request_whose_process_is_killed_is_answered_by_another() -> None:
    work = BoundedWork(COMMAND, "templates", 10, TEMPLATE_BOUNDS)
    order = Order("{{ 1 }}", [], {}, {})
    try:
        said = await work.ask(order)
        assert work.process is not None
        os.kill(work.process.spawned.pid, signal.SIGKILL)
        assert await work.ask(order) == said
    finally:
        work.close()


async def test_a_request_for_which_no_thread_starts_keeps_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    work = BoundedWork(COMMAND, "templates", 10, TEMPLATE_BOUNDS)
    order = Order("{{ 1 }}", [], {}, {})
    try:
        with monkeypatch.context() as lacking:
            lacking.setattr(threading, "_start_new_thread", no_thread)
            with pytest.raises(RuntimeError):
                await work.ask(order)
        assert await work.ask(order)
    finally:
        work.close()


@pytest.mark.parametrize("length", [1, 1 << 22], ids=["answering", "reading"])
def test_a_process_that_stands_still_is_given_up(length: int) -> None:
    """A socket holds less than the longer one of the orders."""
    process = Process(COMMAND, 0.5)
    try:
        os.kill(process.spawned.pid, signal.SIGSTOP)
        with pytest.raises(OSError):
            process.ask(Order("{{ 1 }}", ["x" * length], {}, {}))
    finally:
        process.close()
    assert not process.spawned.alive

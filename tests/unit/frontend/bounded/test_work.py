"""A child process for clients' work ends when nobody needs it, whatever it is doing."""

import threading

from common.aio.processes import python_command
from frontend.bounded.orders import Order
from frontend.bounded.work import BoundedWork

COMMAND = python_command("frontend.bounded.template_server")


async def test_a_process_that_starts_ends_too() -> None:
    starting, go_on = threading.Event(), threading.Event()

    def greeting() -> None:
        starting.set()
        go_on.wait()

    work = BoundedWork(COMMAND, "templates", 10, greeting)
    work.start_soon()
    starting.wait()
    work.close()
    go_on.set()
    work._thread.shutdown()
    assert work.process is not None and not work.process.spawned.alive


async def test_one_that_was_closed_answers_nothing() -> None:
    work = BoundedWork(COMMAND, "templates", 10)
    asking = work.ask(Order("{{ 1 }}", [], {}, {}))
    assert await asking is not None
    work.close()
    assert work.process is not None and not work.process.spawned.alive

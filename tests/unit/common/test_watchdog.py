"""What holds the event loop is told while it does."""

import subprocess
import sys

SCRIPT = """
import asyncio, logging
from common.observability.log_lines import current_request
from common.observability.watchdog import watch_for_stalls
from common.observability.telemetry import EVENT_LOOP_STALLS

class Lines(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)

logging.getLogger("common.observability.watchdog").addHandler(Lines())

def count():
    return EVENT_LOOP_STALLS._value.get()

async def hold():
    current_request.set("request-7")
    while not count():  # holds the loop until somebody says so
        pass

async def main():
    watching = asyncio.create_task(watch_for_stalls(0.05))
    await asyncio.sleep(0)
    await asyncio.create_task(hold())
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)

asyncio.run(main())
"""


def test_the_request_and_the_place_are_told() -> None:
    command = [sys.executable, "-c", SCRIPT]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    # A machine that is busy may make the loop stand for nobody's sake as well.
    (line, *_) = [line for line in told.splitlines() if "request-7" in line]
    assert "the event loop stands still for request request-7" in line
    assert " hold" in line

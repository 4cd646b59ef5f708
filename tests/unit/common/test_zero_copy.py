"""What pyzmq needs for frames that are sent without a copy, in a process that has sent none yet."""

import subprocess
import sys

SCRIPT = """
import zmq
from common.request_plane.fleet_sockets import frontend_context
from tests.open_files import open_files

def eventfds():
    return sum("eventfd" in str(target) for target in open_files().values())

context = frontend_context(None)
before = eventfds()
for _ in range(3):
    zmq.Frame(bytearray(100_000), copy=False)
assert before, "each of ZeroMQ's sockets has one"
# A socket that was closed may still have had one; a thread with sockets of its own has several.
assert eventfds() <= before, (before, eventfds())
"""


def test_a_frontend_has_it_before_the_first_frame() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

"""Forks the processes that share the tests (pytest-xdist) instead of starting an interpreter.

Each imports vLLM, at ten seconds of CPU. A forked one has it, and so have processes that it forks:
see ``tests/e2e/fork_server.py``.
"""

import os
import signal
from collections.abc import Sequence
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.e2e.processes import FORKS


class _ForkedIO(Popen2IO):
    """A forked process in the place of one that execnet starts, with its end of two pipes."""

    def __init__(self, args: Sequence[str], execmodel: Any) -> None:
        theirs, to = os.pipe()
        out, output = os.pipe()
        self._process = FORKS.fork_tests(args[-1], output, theirs)
        os.close(theirs)
        os.close(output)
        super().__init__(os.fdopen(to, "wb"), os.fdopen(out, "rb"), execmodel)

    def wait(self) -> int:
        return self._process.wait()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)


def fork_workers() -> None:
    """Let execnet fork from now on."""
    vars(gateway_io)["Popen2IOMaster"] = _ForkedIO

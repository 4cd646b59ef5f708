"""Runs a function of a test module in a real second process, with JSON in both directions.

Not multiprocessing: its children share the parent's resource tracker, whose meddling with
shared memory is one of the things under test.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from typing import Any, Self

from tests.e2e.processes import environment as own_environment
from tests.e2e.processes import start_process


class Process:
    """A process that runs ``module.function(*arguments)``.

    The function may be a generator: each value that it yields goes to :meth:`read`, and
    each line of :meth:`write` resumes it.
    """

    def __init__(
        self, target: str, *arguments: Any, environment: dict[str, str] | None = None
    ) -> None:
        """
        Args:
            target: ``module:function``.
            arguments: JSON values.
        """
        command = [sys.executable, "-m", "tests.unit.common.transfer.process", target]
        env = own_environment() | (environment or {})
        theirs, to = os.pipe()
        out, output = os.pipe()
        self._in, self._out = os.fdopen(to, "w"), os.fdopen(out)
        self._popen = start_process([*command, json.dumps(arguments)], env, output, theirs)
        os.close(theirs)
        os.close(output)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def read(self) -> Any:
        """The next value that the function yields."""
        for line in self._out:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise AssertionError(f"the process ended with {self._popen.wait()}")

    def write(self, value: Any = None) -> None:
        """Resume the function with a value."""
        self._in.write(json.dumps(value) + "\n")
        self._in.flush()

    def ask(self, value: Any = None) -> Any:
        """Resume the function and wait for its next value."""
        self.write(value)
        return self.read()

    def kill(self) -> None:
        """kill -9."""
        self._popen.send_signal(signal.SIGKILL)
        self._popen.wait(20)

    def pause(self) -> None:
        """kill -STOP: alive, but it answers nothing."""
        self._popen.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """kill -CONT."""
        self._popen.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._in.close()
            self._popen.wait(20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.kill()
        finally:
            self._out.close()


def main() -> None:
    module, _, function = sys.argv[1].partition(":")
    # Standard output carries our lines only; vLLM logs to it when imported.
    run = getattr(importlib.import_module(module), function)(*json.loads(sys.argv[2]))
    answer = None
    try:
        while True:
            print("@" + json.dumps(run.send(answer)), flush=True)
            line = sys.stdin.readline()
            if not line:
                run.close()
                return
            answer = json.loads(line)
    except StopIteration:
        return


if __name__ == "__main__":
    main()

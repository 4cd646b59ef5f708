"""Run pip with its output in a file, and say now and then how far it is.

    python setup/pip_progress.py LOG LOCK -- COMMAND...

``make setup`` calls it: pip prints three lines for each of 200 packages. Ends with the status of
the command; if that is an error, pip's last lines are printed. Standard library only.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

FIRST_S: Final = 5.0
EVERY_S: Final = 15.0
"""Seconds until the first line about progress, and between them."""

POLL_INTERVAL_S: Final = 0.2
LAST_LINES: Final = 15

_PINNED: Final = re.compile(r"^[A-Za-z0-9][\w.-]*==", re.M)
_COLLECTING: Final = re.compile(r"^Collecting ([\w.\[\],-]+)", re.M)
_INSTALLING: Final = "\nInstalling collected packages:"


def progress(said: str, packages: int) -> str:
    """How far pip is.

    Args:
        said: what it has printed.
        packages: that are to be installed.
    """
    if _INSTALLING in said:
        return f"unpacking {packages} packages"
    found = _COLLECTING.findall(said)
    if not found:
        return "starting pip"
    return f"fetching {found[-1]}, package {len(found)} of {packages}"


def run(command: list[str], log: Path, packages: int) -> int:
    """Run the command to its end; its status."""
    began = time.monotonic()
    due = began + FIRST_S
    with log.open("wb") as output:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # or progress comes late
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        while (status := process.poll()) is None:
            time.sleep(POLL_INTERVAL_S)
            if (now := time.monotonic()) >= due:
                due = now + EVERY_S
                said = log.read_text(errors="replace")
                print(f"[{now - began:3.0f} s] {progress(said, packages)}", flush=True)
    if status == 0:
        took = time.monotonic() - began
        print(f"Installed {packages} packages in {took:.0f} s; pip's output is in {log}.")
    else:
        lines = log.read_text(errors="replace").splitlines()
        print(*lines[-LAST_LINES:], sep="\n", file=sys.stderr)
    return status


def main() -> int:
    log, lock, dashes, *command = sys.argv[1:]
    if dashes != "--" or not command:
        raise SystemExit(__doc__)
    return run(command, Path(log), len(_PINNED.findall(Path(lock).read_text())))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # pip has been told as well
        sys.exit(130)

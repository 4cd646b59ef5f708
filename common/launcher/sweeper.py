"""End all started processes, whichever process dies first.

Every process leads a session that its children (vLLM's engine) share, so that the session can be
ended as a whole. A child of the launcher does that when its pipe closes, even if the launcher was
killed. The launcher replaces a killed child.
"""

import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

POLL_INTERVAL_S: Final = 5.0  # between looks at the sessions' shared memory
_GROUP_S: Final = 5.0  # then remaining processes are killed
_STOP, _KILL = b"stop", b"kill"


@dataclass
class Sessions:
    """Started sessions, and the files that they may leave behind.

    Attributes:
        grace_s: time for processes to end by themselves.
        scratch: directory to remove at the end.
        leaders: ids of sessions with processes.
        segments: their files in /dev/shm, noted while the process lives: afterwards nothing
            identifies their owner.
    """

    grace_s: float
    scratch: Path
    leaders: set[int] = field(default_factory=set)
    segments: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Note shared memory, and forget sessions without a process: their ids may be reused."""
        living = self._processes()
        for pid in living:
            self.segments |= _segments_of(pid)
        self.leaders &= set(living.values())

    def _processes(self) -> dict[int, int]:
        """Return the session of each process that has not ended; zombies have."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                # Fields after the command's name, which is in brackets: state, parent, group,
                # session.
                stat = (process / "stat").read_text().rpartition(")")[2].split()
                if int(stat[3]) in self.leaders and stat[0] not in "ZX":
                    found[int(process.name)] = int(stat[3])
        return found

    def end(self, hurry: Callable[[float], bool]) -> None:
        """End all processes and remove their files. ``hurry`` waits, and says if to kill now."""
        self.look()
        # Each leader is asked to end its own children; the rest are ended here.
        for leader in self.leaders:
            _signal(leader, signal.SIGTERM)
        self._wait(self.grace_s, hurry)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._processes() and not (number is signal.SIGTERM and hurry(0)):
                for pid in self._processes():
                    _signal(pid, number)
                self._wait(_GROUP_S, hurry if number is signal.SIGTERM else _sleep)
        for path in self.segments:
            Path(path).unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _wait(self, seconds: float, hurry: Callable[[float], bool]) -> None:
        deadline = time.monotonic() + seconds
        while self._processes() and time.monotonic() < deadline:
            if hurry(0.1):
                return


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _segments_of(pid: int) -> set[str]:
    """Return the files in /dev/shm that a process has mapped or open."""
    process = Path("/proc") / str(pid)
    found: set[str] = set()
    with contextlib.suppress(OSError):
        with (process / "maps").open() as lines:
            paths = [line.split(maxsplit=5)[-1].strip() for line in lines if "/dev/shm/" in line]
        paths += [str(link.readlink()) for link in (process / "fd").iterdir()]
        found.update(path for path in paths if path.startswith("/dev/shm/"))
    return {path for path in found if Path(path).exists()}


class Sweeper:
    """The launcher's side: a child process that outlives it."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._pid = 0
        self._pipe = -1
        self._done = False
        self._looked_at = time.monotonic()
        self._fork()

    def _fork(self) -> None:
        """Start the child. This process has one thread, so a fork is a complete copy."""
        theirs, self._pipe = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(theirs)
            return
        status = 1
        try:
            os.close(self._pipe)
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            _Child(self._sessions, theirs).run()
            status = 0
        finally:
            os._exit(status)

    def started(self, leader: int) -> None:
        """Register the leader of a session."""
        self._sessions.leaders.add(leader)
        self._tell(str(leader).encode())

    def look(self) -> None:
        """Replace a killed child. Note shared memory for the next one, as this one does."""
        if time.monotonic() > self._looked_at + POLL_INTERVAL_S:
            self._looked_at = time.monotonic()
            self._sessions.look()
        if self._gone():
            os.close(self._pipe)
            self._fork()

    def stop(self) -> None:
        """Begin to end all processes."""
        self._tell(_STOP)

    def kill(self) -> None:
        """Kill all remaining processes."""
        self._tell(_KILL)

    def ended(self) -> bool:
        """Return whether all processes have ended. A killed child is replaced."""
        if not self._gone():
            return False
        if self._done:
            return True
        os.close(self._pipe)
        self._fork()
        self.kill()
        return False

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the next look makes another
            os.write(self._pipe, word + b"\n")

    def _gone(self) -> bool:
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid == 0:
                return False
            self._pid, self._done = 0, status == 0
        return True


class _Child:
    """The child process."""

    def __init__(self, sessions: Sessions, pipe: int) -> None:
        self._sessions = sessions
        self._pipe = pipe
        self._words: list[bytes] = []
        self._open = True

    def run(self) -> None:
        while not self._asked():
            self._read(POLL_INTERVAL_S)
            for word in self._words:
                if word.isdigit():
                    self._sessions.leaders.add(int(word))
            self._words = [word for word in self._words if not word.isdigit()]
            self._sessions.look()
        self._sessions.end(self._hurry)

    def _asked(self) -> bool:
        return not self._open or bool(self._words)

    def _read(self, seconds: float) -> None:
        if not self._open:
            time.sleep(min(seconds, POLL_INTERVAL_S))
        elif select.select([self._pipe], [], [], seconds)[0]:
            read = os.read(self._pipe, 1 << 16)
            self._open = bool(read)
            self._words += read.split()  # writes of so few bytes are never torn apart

    def _hurry(self, seconds: float) -> bool:
        if _KILL not in self._words:
            self._read(seconds)
        return _KILL in self._words

"""Ends what was started, whatever ends first.

Every process runs in a session of its own, which its children (vLLM's engine) share, so a session
can be ended as a whole. A child of the launcher does that once its pipe is closed: by the launcher,
or by the kernel if the launcher was killed. If that child is killed, the launcher makes another.
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

LOOK_S: Final = 5.0  # between looks at the sessions' shared memory
_GROUP_S: Final = 5.0  # what is left then is killed
_STOP, _KILL = b"stop", b"kill"


@dataclass
class Sessions:
    """Sessions that were started, and what they may leave.

    Attributes:
        grace_s: how long processes have to end by themselves.
        scratch: a directory that goes with them.
        leaders: ids of the sessions that have processes.
        segments: files in /dev/shm that they had. A process that dies may leave them, and then
            nothing tells whose they are: so they are noted while it lives.
    """

    grace_s: float
    scratch: Path
    leaders: set[int] = field(default_factory=set)
    segments: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Note shared memory, and forget sessions that have no process: their ids are free."""
        living = self._processes()
        for pid in living:
            self.segments |= _segments_of(pid)
        self.leaders &= set(living.values())

    def _processes(self) -> dict[int, int]:
        """The session of each process that has not ended; a zombie has."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                # After the command's name, which is in brackets: state, parent, group, session.
                stat = (process / "stat").read_text().rpartition(")")[2].split()
                if int(stat[3]) in self.leaders and stat[0] not in "ZX":
                    found[int(process.name)] = int(stat[3])
        return found

    def end(self, hurry: Callable[[float], bool]) -> None:
        """End every process, and remove what is left.

        Args:
            hurry: waits for so many seconds, or until processes are to be killed; says whether.
        """
        self.look()
        # Each process is asked to end its own children; who does not is made to.
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
    """Files in /dev/shm that a process has mapped or open."""
    process = Path("/proc") / str(pid)
    found: set[str] = set()
    with contextlib.suppress(OSError):
        with (process / "maps").open() as lines:
            paths = [line.split(maxsplit=5)[-1].strip() for line in lines if "/dev/shm/" in line]
        paths += [str(link.readlink()) for link in (process / "fd").iterdir()]
        found.update(path for path in paths if path.startswith("/dev/shm/"))
    return {path for path in found if Path(path).exists()}


class Sweeper:
    """The launcher's side: a child that outlives it."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._pid = 0
        self._pipe = -1
        self._done = False
        self._fork()

    def _fork(self) -> None:
        """Start the child. This process has one thread, so a fork is a whole copy."""
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
        """Take note of a process that leads a session."""
        self._sessions.leaders.add(leader)
        self._tell(str(leader).encode())

    def look(self) -> None:
        """Make another child if this one was killed."""
        if self._gone():
            os.close(self._pipe)
            self._fork()

    def stop(self) -> None:
        """Begin to end everything."""
        self._tell(_STOP)

    def kill(self) -> None:
        """End everything that is left at once."""
        self._tell(_KILL)

    def ended(self) -> bool:
        """Whether everything has ended. If the child was killed, the next one goes on."""
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
    """What runs there."""

    def __init__(self, sessions: Sessions, pipe: int) -> None:
        self._sessions = sessions
        self._pipe = pipe
        self._words: list[bytes] = []
        self._open = True

    def run(self) -> None:
        while not self._asked():
            self._read(LOOK_S)
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
            time.sleep(min(seconds, LOOK_S))
        elif select.select([self._pipe], [], [], seconds)[0]:
            read = os.read(self._pipe, 1 << 16)
            self._open = bool(read)
            self._words += read.split()  # writes of so few bytes are never torn apart

    def _hurry(self, seconds: float) -> bool:
        if _KILL not in self._words:
            self._read(seconds)
        return _KILL in self._words

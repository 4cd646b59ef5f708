"""The processes of one ``mmrouter up``: start, wait and watch."""

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.aio.processes import end_with_parent, python_command
from common.errors import MmRouterError
from common.launcher.frontend_access import tries, url_of
from common.launcher.options import Plan
from common.launcher.readiness import Place, awaited, cannot_serve, last_of
from common.launcher.sweeper import Sweeper

STOPPED_BY: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Blocked while the fleet runs, so that a signal is taken where it is waited for."""

_REMIND_S: Final = 10.0
_LEAKS: Final = re.compile(rb"nanobind:| - (leaked|\.\.\.) |See https://nanobind")
"""A binding library of vLLM's reports leaks at every exit, page after page."""

_CAUSE: Final = re.compile(rb"[A-Za-z](Error|Exception): |error: |did not start: ")


class EndedError(MmRouterError):
    """A process ended that should run on."""


class StoppedError(Exception):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Started:
    """A process that leads its own session."""

    name: str
    log: Path
    process: "subprocess.Popen[bytes]"
    reported: bool = False

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None


class Fleet:
    """All processes of a plan."""

    def __init__(self, plan: Plan, sweeper: Sweeper, scratch: Path) -> None:
        self._plan = plan
        self._sweeper = sweeper
        self._scratch = scratch
        self._began = time.monotonic()
        self._started: dict[str, Started] = {}
        self._python = os.environ.get("MMROUTER_PYTHON")
        self._common: list[str] = []
        if plan.own_discovery:
            place = scratch / "discovery"
            place.mkdir(mode=0o700)
            self._common = [f"--discovery={place}"]

    @property
    def names(self) -> list[str]:
        return list(self._started)

    @property
    def seconds(self) -> int:
        return int(time.monotonic() - self._began)

    def start(self) -> None:
        """Start all processes until they are ready. Raises EndedError, StoppedError (a signal)."""
        plan = self._plan
        for name, port in zip(plan.frontends, plan.ports, strict=True):
            where = [f"--host={plan.host}", f"--port={port}"]
            # Without a device, so that a frontend never takes GPU memory from a worker.
            self._start(
                name,
                "frontend",
                [*self._common, *where, *plan.frontend_flags],
                {"CUDA_VISIBLE_DEVICES": ""},
            )
        for number, name in enumerate(plan.workers):
            flags = [f"--model={plan.model}", f"--worker-id={name}", *self._common]
            self._start(
                name,
                "backend_worker",
                [*flags, *plan.worker_flags],
                plan.devices.environment(number),
            )
            # vLLM measures free GPU memory while it starts, so workers that share a GPU start one
            # by one.
            if plan.devices.gpus and plan.devices.single:
                self._wait()
        self._wait()

    def _start(self, name: str, module: str, flags: list[str], more: dict[str, str]) -> None:
        words = [*python_command(module), *flags]
        if self._python:
            words[0] = self._python
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self._plan.model or "/").is_dir() else {}
        log = self._plan.run_dir / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self._scratch)}
                | offline
                | more,
                preexec_fn=_in_the_child,  # this process has one thread
            )
        self._sweeper.started(process.pid)
        self._started[name] = Started(name, log, process)

    def _wait(self) -> None:
        places = {
            name: Place(url, self._started[name].log)
            for name, url in zip(self._plan.frontends, self._plan.urls, strict=True)
        }
        logs = {
            name: self._started[name].log for name in self._plan.workers if name in self._started
        }
        shown, shown_at = "", 0.0
        ready: set[str] = set()
        while True:
            for each in self._started.values():
                if each.ended:
                    raise EndedError(f"{_report(each)}; it had not started yet")
            for name, place in places.items():
                # The frontend would retry, since workers of other hosts may be better.
                if self._plan.workers and name not in ready and (why := cannot_serve(place.log)):
                    raise EndedError(f"{name}: {why}")
            left = awaited(places, logs)
            for name in [*places, *logs]:
                if name not in left and name not in ready:
                    ready.add(name)
                    self._say(f"{name} is ready")
            if not left:
                return
            line = "; ".join(f"{name}: {doing}" for name, doing in left.items())
            if line != shown or time.monotonic() > shown_at + _REMIND_S:
                self._say(f"waiting for {line}")
                shown, shown_at = line, time.monotonic()
            # Workers of other hosts may come at any time.
            if self._plan.workers and self.seconds >= self._plan.start_timeout_s:
                raise EndedError(
                    f"not ready after {self._plan.start_timeout_s} s; logs are in "
                    f"{self._plan.run_dir}"
                )
            pause(1.0)
            self._sweeper.look()

    def _say(self, line: str) -> None:
        print(f"[{self.seconds:3} s] {line}", flush=True)

    def ready(self) -> str:
        """Return the text to print once all are ready."""
        names = ", ".join(self._plan.workers)
        if not self._plan.frontends:
            return f"Ready after {self.seconds} s: {names}. Frontends find workers by their cards."
        urls = [url_of(url) for url in self._plan.urls]
        said = [f"Ready at {url}, too." for url in urls[1:]]
        said += [f"Ready after {self.seconds} s at {urls[0]}. Try:", ""]
        try:
            said.append(tries(urls[0], self._plan.run_dir, self._plan.told.key))
        except MmRouterError as error:
            said += [str(error), "A frontend says more to whoever has its key, if it asks for one."]
        return "\n".join(said)

    def watch(self) -> None:
        """Wait until no worker or no frontend is left (EndedError), or a signal (StoppedError)."""
        while True:
            pause(1.0)
            self._sweeper.look()
            for each in self._started.values():
                if not each.ended or each.reported:
                    continue
                each.reported = True
                sentence = _report(each)
                kind = (
                    self._plan.workers if each.name in self._plan.workers else self._plan.frontends
                )
                if all(self._started[name].ended for name in kind):
                    raise EndedError(f"{sentence}; no other is left")
                print(f"{sentence}; the others go on", flush=True)

    def reap(self) -> None:
        """Collect exit statuses."""
        for each in self._started.values():
            each.process.poll()


def pause(seconds: float) -> None:
    """Wait. Raises StoppedError: a signal came, now or before."""
    if found := signal.sigtimedwait(STOPPED_BY, seconds):
        raise StoppedError(found.si_signo)


def _in_the_child() -> None:
    """End a child with its launcher, even before the sweeper knows the child."""
    end_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED_BY)


def _report(ended: Started) -> str:
    """Print the end of its log, and return a sentence with its first error."""
    lines = [line for line in last_of(ended.log).splitlines() if not _LEAKS.match(line)]
    tail = b"\n".join(lines[-40:]).decode(errors="replace")
    print(f"\nThe end of {ended.log}:\n\n{tail}\n", flush=True)
    # vLLM's engine logs the cause long before its parent gives up.
    cause = next((line for line in lines if _CAUSE.search(line)), b"").decode(errors="replace")
    status = ended.process.returncode
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
    return f"{ended.name} {how}{f': {cause.strip()}' if cause else ''}"

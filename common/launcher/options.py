"""Parse and check a ``mmrouter up`` command line.

Every fault that can be found early is reported before any process starts.
"""

import argparse
import contextlib
import os
import platform
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from common.cli.command_line import FRONTEND, WORKER, is_flag, value_of
from common.cli.flag_settings import unknown
from common.cli.known_flags import KnownFlags, installed_vllm
from common.errors import ConfigurationError
from common.launcher import demo
from common.launcher.devices import Devices
from common.launcher.frontend_access import Told, told
from common.startup_checks import check_frontend, check_worker, free_port

OPTIONS: Final = {
    "--workers": ("N", "workers (one for each GPU; 2 on a CPU)"),
    "--frontends": ("N", "frontends (1), the second on the next port and so on"),
    "--host": ("ADDRESS", "where frontends listen (127.0.0.1)"),
    "--port": ("N", "port of the first frontend (8000; 0 is any free one)"),
    "--single-gpu": ("", "let all workers share the first GPU"),
    "--gpus-per-worker": ("N", "GPUs of each worker (1)"),
    "--worker-name": (
        "NAME",
        "what workers are called, before their number (worker; with --discovery this host's name)",
    ),
    "--start-timeout": ("SECONDS", "until a start is given up (900)"),
    "--run-dir": ("DIRECTORY", "where the logs go (.runs/ and the time)"),
    "--engine-args": ("TEXT", "flags for workers alone, quoted as in a shell"),
    "--frontend-args": ("TEXT", "flags for frontends alone"),
}
"""Our own flags: metavar and help."""

HELP: Final = "\n".join(
    [
        "usage: mmrouter up [MODEL] [flags]",
        "",
        "Start workers and a frontend for a model on this machine, until Ctrl-C (twice: at once).",
        "Without MODEL, the demo's tiny random model is made and served.",
        "",
        *(
            f"  {f'{flag} {metavar}'.rstrip():<26}{text}"
            for flag, (metavar, text) in OPTIONS.items()
        ),
        "",
        "Any flag of a frontend or a worker may follow, vLLM's too; it goes to who has it, or to",
        "both: mmrouter frontend --help, mmrouter worker --help. CLIENT_CERT and CLIENT_KEY name",
        "PEM files to show to frontends that ask for a client certificate.",
    ]
)


@dataclass(frozen=True)
class Plan:
    """Processes to start.

    Attributes:
        model: empty if no workers are started.
        workers: names of the workers.
        own_discovery: cards are in a directory that is removed with this process.
    """

    model: str
    workers: list[str]
    worker_flags: list[str]
    frontend_flags: list[str]
    host: str
    ports: list[int]
    told: Told
    devices: Devices
    own_discovery: bool
    start_timeout_s: int
    drain_s: float
    run_dir: Path
    frontends: list[str] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        """URLs of the frontends, reachable from this host."""
        if self.told.uds:
            return [f"unix://{self.told.uds}"]
        reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        address = f"[{reached}]" if ":" in reached else reached
        return [f"http://{address}:{port}" for port in self.ports]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


class Request:
    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Split the arguments, unchecked. Raises ConfigurationError: an unknown one."""
        self._environ = environ
        self._known = {
            command: (known_flags(command), names)
            for command, names in (("frontend", FRONTEND), ("worker", WORKER))
        }
        self.flags: dict[str, list[str]] = {"frontend": [], "worker": []}
        self.own = self._parse(list(self._share_out(argv)))
        self._add_words("engine_args", "worker")
        self._add_words("frontend_args", "frontend")

    def _share_out(self, words: Sequence[str]) -> Iterator[str]:
        """Pass each flag with its values to the processes that know it; return our own."""
        at = next((n for n, word in enumerate(words) if is_flag(word)), len(words))
        if at > 1:
            raise ConfigurationError(f"unexpected argument {words[1]!r}: one model is served")
        yield from (f"--model={model}" for model in words[:at])
        while at < len(words):
            end = at + 1
            while end < len(words) and not is_flag(words[end]):
                end += 1
            flag, equals, value = words[at].partition("=")
            flag = flag.replace("_", "-")
            if flag in ("--engine-args", "--frontend-args") and not equals and words[at + 1 :]:
                end = at + 2  # the next word contains flags of a process
                yield f"{flag}={words[at + 1]}"
            elif flag in OPTIONS or flag == "--model":
                yield from [flag + equals + value, *words[at + 1 : end]]
            else:
                self._to_who_knows(flag, words[at:end])
            at = end

    def _to_who_knows(self, flag: str, words: Sequence[str]) -> None:
        if flag == "--config":
            raise ConfigurationError(
                "--config is a flag of both: write --frontend-args '--config FILE' or "
                "--engine-args '--config FILE'"
            )
        takers = [
            command
            for command, (known, names) in self._known.items()
            if flag.partition(".")[0] in known.flags or flag in names.aliases
        ]
        if not takers:
            every = {each for known, _ in self._known.values() for each in known.flags}
            raise ConfigurationError(unknown(flag, every | {*OPTIONS}))
        for command in takers:
            self.flags[command] += words

    def _parse(self, words: Sequence[str]) -> argparse.Namespace:
        parser = _Parser("mmrouter up", add_help=False, allow_abbrev=False)
        parser.add_argument("--model")
        for flag, (metavar, _) in OPTIONS.items():
            if metavar:
                parser.add_argument(flag)
            else:
                parser.add_argument(flag, action="store_true")
        return parser.parse_args(words)

    def _add_words(self, option: str, command: str) -> None:
        text: str = getattr(self.own, option) or ""
        try:
            self.flags[command] += shlex.split(text)
        except ValueError as error:
            raise ConfigurationError(
                f"{_flag(option)} can't be taken apart ({error}): {text}"
            ) from None

    def number(self, option: str, default: int, least: int) -> int:
        """Return a whole number in digits, at least ``least``."""
        text: str = getattr(self.own, option) or str(default)
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise ConfigurationError(f"{_flag(option)} must be a number, not {text!r}")
        if int(text) < least:
            raise ConfigurationError(f"{_flag(option)} must be {least} or more, not {text}")
        return int(text)

    def check_flags(self) -> None:
        """Raise ConfigurationError for flags that the processes would refuse at once."""
        for command, (known, names) in self._known.items():
            known.check(self.flags[command], names, self._environ)

    def place(self) -> str:
        """Return the user's place for cards; empty if none is given."""
        words = self.flags["frontend"] + self.flags["worker"]
        return value_of("--discovery", words) or self._environ.get("MMROUTER_DISCOVERY") or ""

    def check_count(self, workers: int, frontends: int, place: str) -> None:
        """Raise ConfigurationError if nothing is to be started, or one side is missing."""
        if not workers + frontends:
            raise ConfigurationError(
                "--workers and --frontends are both 0: there is nothing to start"
            )
        if not workers and not place:
            raise ConfigurationError(
                "--workers=0 starts frontends only: set --discovery to the place where workers "
                "that run already publish their cards"
            )
        if not frontends and not place:
            raise ConfigurationError(
                "--frontends=0 starts workers only: set --discovery to the place where frontends "
                "that run already look for cards"
            )

    def ports(self, frontends: int, host: str) -> list[int]:
        """Return a free port for each frontend. Raises ConfigurationError: there is none."""
        first = self.number("port", 8000, 0)
        if first + frontends > 65536:
            raise ConfigurationError(
                f"--port={first}: ports end at 65535, and {frontends} frontends need one each"
            )
        found: list[int] = []
        for number in range(frontends):
            wanted = first + number if first else 0
            found.append(free_port(host, wanted, found))
        return found


def make_plan(argv: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Make the plan. Creates only the log directory. Raises MmRouterError: it is impossible."""
    asked = Request(argv, environ)
    asked.check_flags()
    place = asked.place()
    frontends = asked.number("frontends", 1, 0)
    devices = Devices.find(
        single=asked.own.single_gpu, per_worker=asked.number("gpus_per_worker", 1, 1)
    )
    workers = asked.number("workers", devices.fitting, 0)
    asked.check_count(workers, frontends, place)
    timeout = asked.number("start_timeout", 900, 1)
    name = asked.own.worker_name or (platform.node() if place else "worker")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ConfigurationError(
            f"--worker-name must have letters, digits, dots, _ and - only, not {name!r}"
        )
    devices.check(workers)
    client, model = Told(), ""
    if frontends:
        line = check_frontend(asked.flags["frontend"], listens=False)
        client = told(line)
    if workers:
        own = asked.own.model
        model = demo.model_of(asked.flags) if own is None else own
        words = [] if own is None else [f"--model={own}"]
        check_worker([*words, *asked.flags["worker"]], of_demo=own is None)
    host = asked.own.host or "127.0.0.1"
    if client.uds and frontends > 1:
        raise ConfigurationError(f"--uds is one socket, and --frontends is {frontends}")
    return Plan(
        model=model,
        workers=[f"{name}-{number}" for number in range(workers)],
        worker_flags=devices.flags(workers) + asked.flags["worker"],
        frontend_flags=asked.flags["frontend"],
        host=host,
        ports=asked.ports(frontends, host),
        told=client,
        devices=devices,
        own_discovery=not place,
        start_timeout_s=timeout,
        drain_s=_seconds(value_of("--drain-timeout", asked.flags["worker"]) or "60"),
        run_dir=_run_dir(asked),
        frontends=[f"frontend{f'-{number}' if number else ''}" for number in range(frontends)],
    )


def _run_dir(asked: Request) -> Path:
    stamp = f".runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path = Path(asked.own.run_dir or stamp).absolute()
    with contextlib.suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
    if not (path.is_dir() and os.access(path, os.W_OK)):
        raise ConfigurationError(
            f"--run-dir={path} can't be written to: name a directory for the logs"
        )
    return path


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 60.0  # the processes report the error


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def known_flags(command: str) -> KnownFlags:
    known = KnownFlags.of(command)
    if known is None:
        raise ConfigurationError(f"vLLM {installed_vllm()} is installed, which is not supported")
    return known

"""Log lines of all processes: text or JSON objects, with the request that they concern.

Our own lines must not contain user text or media locations. Lines of vLLM and the HTTP server get
the same format, unless the user configures vLLM's. They do quote users, so :class:`Reserved`
removes text from lines about a request. docs/operations.md lists the exceptions.
"""

import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from common.backoff import Backoff
from common.errors import MmRouterError, causes
from common.observability import tracing

OURS: Final = ("common", "frontend", "backend_worker", "mmrouter")  # loggers of this project

current_request: Final[ContextVar[str]] = ContextVar("request", default="")
"""Our id of the request that the code works on; empty if it is none's."""


class LogLevel(StrEnum):
    """Levels of log lines, as in vLLM."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class LogFormat(StrEnum):
    """Format of log lines."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True)
class LogSetup:
    """Logging of a process, by its name."""

    level: LogLevel
    form: LogFormat
    process: str

    def formatter(self) -> logging.Formatter:
        return JsonLines(self.process) if self.form is LogFormat.JSON else TextLines(self.process)


class TextLines(logging.Formatter):
    """``INFO 2026-11-26 05:12:44 [frontend ID-OF-REQUEST] frontend.app: message``."""

    def __init__(self, process: str) -> None:
        layout = "%(levelname)s %(asctime)s %(place)s %(name)s: %(message)s"
        super().__init__(layout, "%Y-%m-%d %H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        request = current_request.get()
        record.place = f"[{self._process} {request}]" if request else f"[{self._process}]"
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Indent all lines but the first: quoted text could imitate a line of its own."""
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\n    ")


class JsonLines(logging.Formatter):
    """One object per line: ``time``, ``level``, ``logger``, ``process``, ``message``, and if known
    ``request_id``, ``trace_id``, ``span_id`` and ``exception``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if request := current_request.get():
            line["request_id"] = request
        if (span := tracing.current()) is not None:
            line["trace_id"] = span.trace_id
            line["span_id"] = span.span_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["exception"] = record.exc_text
        return json.dumps(line)


_OF_NO_REQUEST: Final = ("vllm.config.", "vllm.platforms.")
"""Loggers of vLLM's configuration, which a frontend makes in a thread when a worker has come."""


class Reserved(logging.Filter):
    """Remove possible user text from lines about a request: text arguments, and messages of errors.
    Numbers, error types and traces stay. vLLM's worker threads don't know their request, so all
    their lines count."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging; all lines pass."""
        if not current_request.get() and record.threadName == threading.main_thread().name:
            return True
        if record.name.startswith(_OF_NO_REQUEST):
            return True
        if record.name == "uvicorn.access":
            _cut_query(record)
            return True
        if isinstance(record.args, tuple):
            record.args = tuple(_unless_text(each) for each in record.args)
        elif record.args:
            record.args = {key: _unless_text(each) for key, each in record.args.items()}
        if record.exc_info and isinstance(record.exc_info[1], BaseException):
            chain = list(causes(record.exc_info[1]))
            if any(isinstance(error, MmRouterError) and error.status != 500 for error in chain):
                # The client's fault or the fleet's, for which vLLM's streams log an error with a
                # trace of 22 lines.
                record.levelno, record.levelname = logging.INFO, "INFO"
                record.msg = f"{record.msg} ({', '.join(type(error).__name__ for error in chain)})"
            else:
                record.exc_text = "".join(
                    f"{''.join(traceback.format_tb(error.__traceback__))}{type(error).__name__}\n"
                    for error in chain
                ).rstrip()
            record.exc_info = None
        return True


class Paced(logging.Filter):
    """Rate-limit warnings and errors per place in the code, which clients can cause at no cost;
    count the rest. Lines about the fleet have a higher limit: hundreds of workers may leave."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int, bool], _Minute] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now = self._clock()
        fleet = record.name.startswith(_FLEET) and not current_request.get()
        most = _FLEET_LINES_A_MINUTE if fleet else _LINES_A_MINUTE
        with self._lock:
            place = record.pathname, record.lineno, fleet
            minute = self._places.setdefault(place, _Minute(now))
            lost = 0
            if now - minute.began >= _MINUTE_S:
                lost = max(0, minute.lines - most)
                minute.began, minute.lines = now, 0
            minute.lines += 1
            passes = minute.lines <= most
        if lost:
            record.msg = f"{record.msg} [{lost} more such lines were left out]"
        return passes


_FLEET: Final = ("common.discovery", "frontend.workers", "frontend.router")
_FLEET_LINES_A_MINUTE: Final = 2000
_LINES_A_MINUTE: Final = 60
_MINUTE_S: Final = 60.0


@dataclass
class _Minute:
    """Lines of a place since ``began``."""

    began: float
    lines: int = 0


def _unless_text(value: object) -> object:
    return value if isinstance(value, int | float) else "…"


def _cut_query(record: logging.LogRecord) -> None:
    """Cut the query from uvicorn's client, method, path, version and status."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, version, status = record.args
        record.args = (client, method, str(path).partition("?")[0], version, status)


_in_force: LogSetup | None = None


def log_setup() -> LogSetup | None:
    """Return the logging of this process; None before :func:`configure_logging`."""
    return _in_force


def configure_logging(setup: LogSetup) -> None:
    """Send our lines to stderr, and those of unconfigured libraries from warnings on."""
    global _in_force
    _in_force = setup
    handler = logging.StreamHandler()
    handler.setFormatter(setup.formatter())
    handler.addFilter(Paced())
    for package in OURS:
        logger = logging.getLogger(package)
        logger.setLevel(setup.level.upper())
        logger.addHandler(handler)
        logger.propagate = False
    if not logging.root.handlers:
        logging.root.addHandler(handler)


def adopt(loggers: Iterable[str]) -> None:
    """Give other loggers' lines our format; their levels and streams stay."""
    if _in_force is None:
        return
    for handler in _handlers(loggers):
        handler.setFormatter(_in_force.formatter())


def reserve(loggers: Iterable[str]) -> None:
    """Add :class:`Reserved` and :class:`Paced` to other loggers."""
    for handler in _handlers(loggers):
        if not any(isinstance(each, Reserved) for each in handler.filters):
            handler.addFilter(Reserved())
            handler.addFilter(Paced())


def _handlers(loggers: Iterable[str]) -> list[logging.Handler]:
    return [handler for name in loggers for handler in logging.getLogger(name).handlers]


FIRST_LINE_S: Final = 10.0  # delay of the first line; shorter operations log nothing

MAX_PAUSE_S: Final = 60.0


@contextmanager
def log_progress(
    what: str,
    say: Callable[[str], object],
    *,
    first_s: float = FIRST_LINE_S,
    longest_s: float = MAX_PAUSE_S,
) -> Iterator[None]:
    """Log the progress of a long operation at doubling intervals. Uses a thread, so it works while
    the event loop is blocked."""
    ended = threading.Event()
    began = time.monotonic()

    def speak() -> None:
        backoff = Backoff(first_s, longest_s)
        while not ended.wait(backoff.next_s()):
            say(f"{what} ({time.monotonic() - began:.0f} s so far)")

    speaker = threading.Thread(target=speak, name="still-busy", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()

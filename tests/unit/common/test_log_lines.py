"""Log lines as text and as JSON: of ours, of vLLM's and of the HTTP server's, one line each."""

import io
import json
import logging
import logging.config
import threading
from argparse import Namespace
from collections.abc import Iterator

import pytest
import uvicorn
from vllm import logger as vllms_logger
from vllm.config.logging import LoggingConfig

from common.cli.vllm_command_line import adopt_servers_lines, configure_vllms_logging
from common.errors import (
    EngineFailedError,
    MmRouterError,
    NoWorkerError,
    RequestRejectedError,
)
from common.observability import log_lines
from common.observability.log_lines import (
    JsonLines,
    LogFormat,
    LogLevel,
    LogSetup,
    Paced,
    Reserved,
    TextLines,
    adopt,
    configure_logging,
    current_request,
    log_setup,
)
from common.observability.tracing import span_of_request
from tests.fakes.spans import recorded_spans

# vLLM's formatter asks for a module by its old name.
VLLMS_JSON = pytest.mark.filterwarnings("ignore:pythonjsonlogger.jsonlogger has been moved")

SERVERS = ("uvicorn", "uvicorn.access", "uvicorn.error")


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loggers of the process, which tests here configure."""
    names = (None, "vllm", *SERVERS, *log_lines.OURS)
    loggers = [logging.getLogger(name) for name in names]
    before = [(one, one.handlers[:], one.level, one.propagate) for one in loggers]
    monkeypatch.setattr(log_lines, "_in_force", None)
    monkeypatch.setattr(vllms_logger, "_last_configured_logging_config", None)
    yield
    for one, handlers, level, propagates in before:
        one.handlers[:], one.propagate = handlers, propagates
        one.setLevel(level)


def line(formatter: logging.Formatter, message: str, *args: object, error: bool = False) -> str:
    record = logging.LogRecord("frontend.app", logging.WARNING, __file__, 1, message, args, None)
    if error:
        try:
            raise KeyError("x")
        except KeyError as raised:
            record.exc_info = (KeyError, raised, raised.__traceback__)
    return formatter.format(record)


def test_text_names_process_and_request() -> None:
    formatter = TextLines("w0")
    assert line(formatter, "a %d", 1).endswith(" [w0] frontend.app: a 1")
    token = current_request.set("4f1e")
    assert line(formatter, "a").startswith("WARNING ")
    assert line(formatter, "a").endswith(" [w0 4f1e] frontend.app: a")
    current_request.reset(token)
    assert line(formatter, "a", error=True).endswith("KeyError: 'x'")


def test_json_is_one_object_on_one_line_whatever_the_message() -> None:
    formatter = JsonLines("w0")
    hostile = 'a\nb\r\u2028"}\ud800{"level": "info"}\x00\x1b[31m'
    text = line(formatter, "%s", hostile, error=True)
    assert len(text.splitlines()) == 1 and text.isascii() and text.isprintable()
    said = json.loads(text)
    assert said.pop("time").endswith("Z")
    assert "KeyError" in said.pop("exception")
    assert said == {
        "level": "warning",
        "logger": "frontend.app",
        "process": "w0",
        "message": hostile,
    }


def test_json_says_request_and_trace() -> None:
    token = current_request.set("4f1e")
    with recorded_spans(), span_of_request("request", {}) as span:
        assert span is not None
        said = json.loads(line(JsonLines("w0"), "a"))
        assert said["request_id"] == "4f1e"
        assert (said["trace_id"], said["span_id"]) == (span.trace_id, span.span_id)
    current_request.reset(token)


def setup(form: LogFormat) -> LogSetup:
    return LogSetup(LogLevel.INFO, form, "frontend")


def streams(*names: str) -> dict[str, io.StringIO]:
    """What is written by the handlers of loggers from now on."""
    found = {}
    for name in names:
        (handler,) = logging.getLogger(name).handlers
        assert isinstance(handler, logging.StreamHandler)
        found[name] = handler.stream = io.StringIO()
    return found


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("form", list(LogFormat))
def test_vllms_and_the_servers_lines_look_like_ours(
    form: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As they are before any server ran in this process; uvicorn's configuration does not say.
    for name in ("uvicorn.error", "uvicorn.access"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
    configure_logging(setup(form))
    assert log_setup() == setup(form)
    args = Namespace(logging_config=LoggingConfig(pylogging_config_file=None))
    configure_vllms_logging(args)
    logging.config.dictConfig(uvicorn.config.LOGGING_CONFIG)
    adopt_servers_lines(args)
    written = streams("vllm", "uvicorn", "uvicorn.access")
    logging.getLogger("vllm.engine").warning("of vLLM")
    logging.getLogger("uvicorn.error").warning("of the server")
    access = ("127.0.0.1:1", "POST", "/v1/chat/completions", "1.1", 200)
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *access)
    for text in (stream.getvalue() for stream in written.values()):
        assert len(text.splitlines()) == 1
        if form is LogFormat.JSON:
            assert json.loads(text)["process"] == "frontend"
        else:
            assert " [frontend] " in text


@VLLMS_JSON
@pytest.mark.usefixtures("restored")
def test_what_the_user_says_of_vllms_lines_is_left_alone() -> None:
    configure_logging(setup(LogFormat.JSON))
    args = Namespace(logging_config=LoggingConfig(pylogging_config_file=None, formatter="json"))
    configure_vllms_logging(args)
    (handler,) = logging.getLogger("vllm").handlers
    assert not isinstance(handler.formatter, JsonLines)


@VLLMS_JSON
@pytest.mark.usefixtures("restored")
def test_the_engines_processes_get_json_too() -> None:
    configure_logging(setup(LogFormat.JSON))
    args = Namespace(logging_config=LoggingConfig(pylogging_config_file=None))
    configure_vllms_logging(args, engine=True)
    assert args.logging_config.formatter == "json"
    (handler,) = logging.getLogger("vllm").handlers
    assert isinstance(handler.formatter, JsonLines), "in this process as ours"
    vllms_logger.configure_logging_if_needed(args.logging_config)  # as the engine does
    (handler,) = logging.getLogger("vllm").handlers
    assert isinstance(handler.formatter, JsonLines)


@pytest.mark.usefixtures("restored")
def test_libraries_without_a_say_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    configure_logging(setup(LogFormat.JSON))
    configure_logging(setup(LogFormat.JSON))
    (handler,) = logging.root.handlers
    assert isinstance(handler.formatter, JsonLines)


@pytest.mark.usefixtures("restored")
def test_nothing_is_adopted_before_somebody_has_said_how() -> None:
    logger, handler = logging.getLogger("of this test"), logging.StreamHandler()
    logger.addHandler(handler)
    adopt(("of this test",))
    assert handler.formatter is None
    logger.removeHandler(handler)


def reserved(
    message: str, *args: object, name: str = "vllm.x", error: Exception | None = None
) -> str:
    """A line about a request, as text."""
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord(name, logging.ERROR, __file__, 1, message, args, exc_info)
    token = current_request.set("4f1e")
    assert Reserved().filter(record)
    current_request.reset(token)
    text = TextLines("f").format(record)
    assert "exception" not in json.loads(JsonLines("f").format(record)) or error is not None
    return text.partition(": ")[2]


def test_of_others_lines_about_a_request_only_numbers_and_places_are_left() -> None:
    assert reserved("got %s in %d of %.1f s", {"prompt": "canary"}, 3, 0.5) == "got … in 3 of 0.5 s"
    assert reserved("%(a)s and %(b)d", {"a": "canary", "b": 1}) == "… and 1"
    assert reserved("nothing to put in: 100%") == "nothing to put in: 100%"
    assert reserved("is %s", "Qwen2VL", name="vllm.config.model") == "is Qwen2VL"
    try:
        try:
            raise ValueError("canary")
        except ValueError as error:
            raise KeyError("canary") from error
    except KeyError as error:
        text = reserved("failed: %s", error, error=error)
    assert "KeyError" in text and "ValueError" in text and __file__ in text
    assert "canary\n" not in text and not text.endswith("canary")


@pytest.mark.parametrize("ours", [RequestRejectedError, NoWorkerError, EngineFailedError])
def test_a_fault_of_clients_or_workers_in_a_stream_is_one_line(ours: type[MmRouterError]) -> None:
    """vLLM's streams log a trace of whatever ends them."""
    try:
        try:
            raise ours("canary")
        except MmRouterError as error:
            raise KeyError from error
    except KeyError as error:
        text = reserved("Error in completion stream generator.", error=error)
    assert ours.__name__ in text
    assert len(text.splitlines()) == 1 or ours is EngineFailedError
    assert (__file__ in text) == (ours is EngineFailedError)


@pytest.mark.parametrize(("ours", "level"), [(NoWorkerError, "INFO"), (EngineFailedError, "ERROR")])
def test_a_refused_stream_is_no_error(ours: type[MmRouterError], level: str) -> None:
    error = ours("canary")
    record = logging.LogRecord("vllm", logging.ERROR, "", 1, "failed", (), (ours, error, None))
    token = current_request.set("4f1e")
    Reserved().filter(record)
    current_request.reset(token)
    assert record.levelname == level


def test_what_is_about_no_request_is_left_as_it_is() -> None:
    record = logging.LogRecord("vllm", logging.INFO, "", 1, "model %s", ("demo",), None)
    assert Reserved().filter(record)
    assert record.getMessage() == "model demo"


def test_a_thread_that_knows_no_request_may_have_a_users_words() -> None:
    records: list[logging.LogRecord] = []

    def log() -> None:
        said = "canary\nINFO 10:00:00 [f] all is well"
        record = logging.LogRecord("vllm.renderers", 30, "", 1, "rejected: %s", (said,), None)
        assert Reserved().filter(record)
        records.append(record)

    thread = threading.Thread(target=log)
    thread.start()
    thread.join()
    assert records[0].getMessage() == "rejected: …"


def test_no_message_looks_like_a_line_of_its_own() -> None:
    said = "a\nINFO 10:00:00 [f] all is well\r"
    record = logging.LogRecord("vllm", logging.INFO, "", 1, said, None, None)
    first, second = TextLines("f").format(record).split("\n")
    assert first.endswith("a") and second == "    INFO 10:00:00 [f] all is well\\r"


def test_the_servers_line_of_a_request_is_without_its_query() -> None:
    access = ("127.0.0.1:1", "GET", "/v1/models?key=canary", "1.1", 200)
    line = reserved('%s - "%s %s HTTP/%s" %d', *access, name="uvicorn.access")
    assert line == '127.0.0.1:1 - "GET /v1/models HTTP/1.1" 200'


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("asked", [True, False])
def test_who_asks_for_requests_in_the_log_gets_them(asked: bool) -> None:
    args = Namespace(logging_config=LoggingConfig(), enable_log_requests=asked)
    configure_vllms_logging(args)
    configure_vllms_logging(args)
    (handler,) = logging.getLogger("vllm").handlers
    assert sum(isinstance(one, Reserved) for one in handler.filters) == (not asked)


def test_each_place_writes_so_many_warnings_a_minute() -> None:
    now = 100.0
    written: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())

    logger = logging.Logger("anything")
    handler = Lines()
    handler.addFilter(Paced(lambda: now))
    logger.addHandler(handler)

    def warn() -> None:
        logger.warning("client %s sent nonsense of 100%%", "x")

    for _ in range(1000):
        warn()
        logger.info("all of these pass")
    assert written.count("client x sent nonsense of 100%") == 60
    assert written.count("all of these pass") == 1000
    logger.error("another place")
    assert written[-1] == "another place"
    now += 61
    warn()
    assert written[-1] == "client x sent nonsense of 100% [940 more such lines were left out]"
    warn()
    assert written[-1] == "client x sent nonsense of 100%"


def test_lines_of_the_fleet_have_a_limit_of_their_own() -> None:
    paced = Paced(lambda: 100.0)

    def passes(name: str) -> bool:
        record = logging.LogRecord(name, logging.WARNING, f"{name}.py", 7, "lost", (), None)
        return paced.filter(record)

    token = current_request.set("one of a client")
    noise = [passes("frontend.workers.serving") for _ in range(1000)]
    current_request.reset(token)
    assert sum(noise) == 60
    assert all(passes("frontend.workers.serving") for _ in range(1000)), "workers, all at once"
    assert sum(passes("frontend.http.server") for _ in range(1000)) == 60

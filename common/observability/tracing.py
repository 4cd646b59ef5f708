"""Trace of a request, independent of OpenTelemetry.

OpenTelemetry is imported only with ``--otlp-traces-endpoint``; :mod:`common.observability.otel`
then makes the spans.

The current span is a context variable. Do not set it across a ``yield`` of an asynchronous
generator, which runs in its consumer's context.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Annotated, Final, Protocol, TypeAlias

import msgspec

from common.errors import ConfigurationError

MAX_PARENT_LEN: Final = 128
"""Characters of a ``traceparent``; today's have 55, later versions may have more."""

MAX_STATE_LEN: Final = 512
"""Characters of a ``tracestate``, as many as W3C wants passed on; a longer one is left out."""

TraceHeaders: TypeAlias = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=len("traceparent"))],
        Annotated[str, msgspec.Meta(max_length=MAX_STATE_LEN)],
    ],
    msgspec.Meta(max_length=2),
]
"""W3C's ``traceparent`` and ``tracestate``: what a message or a request says of its trace."""

Value: TypeAlias = str | int | float | Sequence[str]

_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?"
)
_STATE = re.compile(r"[ -~\t]*")


class Kind(Enum):
    """A span's role between processes."""

    INTERNAL = "within one"
    SERVER = "for another, which asked for it"
    CLIENT = "another does it"


class Span(Protocol):
    """A span of a trace, with ids in hexadecimal digits; the sampler decides on its export."""

    @property
    def recording(self) -> bool: ...

    @property
    def trace_id(self) -> str: ...

    @property
    def span_id(self) -> str: ...

    def child(
        self,
        name: str,
        kind: Kind = Kind.INTERNAL,
        attributes: Mapping[str, Value] | None = None,
    ) -> "Span":
        """Begin a child span."""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Set attributes. Never user text, nor media locations."""

    def add(self, name: str, amount: int) -> None:
        """Increase a numeric attribute."""

    def event(self, name: str, attributes: Mapping[str, Value]) -> None:
        """Record an event."""

    def link(self, other: "Span") -> None:
        """Link a span that did a part of this one, for several requests."""

    def headers(self) -> dict[str, str]:
        """Return the trace context for another process."""

    def rename(self, name: str) -> None:
        """Set the name, once it is known."""

    def end(self, error: str | None = None) -> None:
        """End it once, with an error's type. Never a message: it may quote a user."""


class Tracer(Protocol):
    """Makes root spans of this process."""

    def begin(self, name: str, kind: Kind, headers: Mapping[str, str]) -> Span:
        """Begin a span, as a child of the trace context in the headers; see :func:`clean`."""


_tracer: Tracer | None = None
_current: ContextVar[Span | None] = ContextVar("span", default=None)


def install(tracer: Tracer | None) -> None:
    """Set the tracer; None stops tracing."""
    global _tracer
    _tracer = tracer


def enabled() -> bool:
    return _tracer is not None


def current() -> Span | None:
    """Return the current span; None if not traced."""
    return _current.get()


def enter(span: Span | None) -> Span | None:
    """Make a span current; return the previous one, to be entered again at its end. Without a
    ``contextvars`` token: it can't be reset if another task closes the asynchronous generator."""
    before = _current.get()
    _current.set(span)
    return before


@contextmanager
def span_of_request(name: str, headers: Mapping[str, str]) -> Iterator[Span | None]:
    """Make a span for an external request and set it as current; None if this process does not
    trace. An error marks it as failed. Invalid trace headers are ignored."""
    if _tracer is None:
        yield None
        return
    span = _tracer.begin(name, Kind.SERVER, clean(headers))
    before = enter(span)
    error: str | None = None
    try:
        yield span
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        enter(before)
        span.end(error)


def link_to(other: Span | None) -> None:
    """Link another request's span that did, or does, a part of the current one."""
    span = _current.get()
    if span is not None and other is not None and span is not other:
        span.link(other)


def headers_onwards(given: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return trace headers for the next process: of the current span, else the given ones."""
    span = _current.get()
    return (span.headers() if span is not None else clean(given or {})) or None


def clean(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the valid part of an untrusted trace context; empty if there is none."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if len(parent) > MAX_PARENT_LEN or not _PARENT.fullmatch(parent):
        return {}
    if not state or len(state) > MAX_STATE_LEN or not _STATE.fullmatch(state):
        return {"traceparent": parent}
    return {"traceparent": parent, "tracestate": state}


def of_http(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the trace context of an HTTP request, whose header names are in lower case. Several
    parents count as none; several states are joined, as W3C says."""
    parents = [value for name, value in headers if name == b"traceparent"]
    states = [value for name, value in headers if name == b"tracestate"]
    if len(parents) != 1 or sum(map(len, states)) > MAX_STATE_LEN:
        states = []
    return clean(
        {
            "traceparent": parents[0].decode("latin-1") if len(parents) == 1 else "",
            "tracestate": b",".join(states).decode("latin-1"),
        }
    )


@contextmanager
def exporting(endpoint: str | None, instance: str) -> Iterator[None]:
    """Trace to an endpoint that :func:`prepare` has accepted; do nothing without one."""
    if endpoint is None:
        yield
        return
    from common.observability.otel import Export

    export = Export(endpoint, instance)
    try:
        yield
    finally:
        export.close()


def prepare(endpoint: str | None, role: str) -> None:
    """Check that spans can be exported, and send vLLM's the same way, before any process starts.
    ``role`` is ``frontend`` or ``worker``, for the service name. Raises ConfigurationError."""
    if endpoint is None:
        return
    try:
        from common.observability.otel import prepare_environment
    except ImportError as error:
        raise ConfigurationError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        ) from error
    prepare_environment(endpoint, role)

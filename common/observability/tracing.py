"""The trace of a request, as the rest of the code sees it.

OpenTelemetry is imported only where ``--otlp-traces-endpoint`` asks for traces; what then makes
spans is :mod:`common.observability.otel`.

A request's spans are found by the context (``contextvars``) that its code runs in. So whatever sets
the current span must not do it across a ``yield`` of an asynchronous generator, which runs in the
context of whoever iterates it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Annotated, Final, Protocol, TypeAlias

import msgspec

from common.errors import ConfigurationError

LONGEST_PARENT: Final = 128
"""Characters of a ``traceparent``; today's have 55, later versions may have more."""

LONGEST_STATE: Final = 512
"""Characters of a ``tracestate``, as many as W3C wants passed on; a longer one is left out."""

TraceHeaders: TypeAlias = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=len("traceparent"))],
        Annotated[str, msgspec.Meta(max_length=LONGEST_STATE)],
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
    """A span's place between processes."""

    INTERNAL = "within one"
    SERVER = "for another, which asked for it"
    CLIENT = "another does it"


class Span(Protocol):
    """A piece of work in a trace, with ids in hexadecimal digits; the sampler says if it is
    exported."""

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
        """Begin a part of it."""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Say more of it. Never what users wrote, nor where their media are."""

    def add(self, name: str, amount: int) -> None:
        """Count up an attribute of it."""

    def event(self, name: str, attributes: Mapping[str, Value]) -> None:
        """Something happened meanwhile."""

    def link(self, other: "Span") -> None:
        """Another one did a part of it, for several."""

    def headers(self) -> dict[str, str]:
        """How another process makes children of it."""

    def rename(self, name: str) -> None:
        """Its name is only known now."""

    def end(self, error: str | None = None) -> None:
        """It is over, perhaps by an error of a type. Never a message, which may quote a user. Later
        calls do nothing."""


class Tracer(Protocol):
    """Makes spans that are nobody's child in this process."""

    def begin(self, name: str, kind: Kind, headers: Mapping[str, str]) -> Span:
        """Begin one, as the child of another process's span; see :func:`clean`."""


_tracer: Tracer | None = None
_current: ContextVar[Span | None] = ContextVar("span", default=None)


def install(tracer: Tracer | None) -> None:
    """Trace from now on, or no longer."""
    global _tracer
    _tracer = tracer


def enabled() -> bool:
    return _tracer is not None


def current() -> Span | None:
    """The span that the calling code is a part of; None if it is not traced."""
    return _current.get()


def enter(span: Span | None) -> Span | None:
    """Make a span the current one; returns the one before, to be entered again at its end.

    Not by a token of ``contextvars``: that can't be used where an asynchronous generator is closed
    by another task than the one that ran it.
    """
    before = _current.get()
    _current.set(span)
    return before


@contextmanager
def span_of_request(name: str, headers: Mapping[str, str]) -> Iterator[Span | None]:
    """The span of a request that came from outside, current inside of this; None if this process
    does not trace. An error ends it as failed. Headers that are no usable trace context are passed
    over."""
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
    """Another request's span did, or does, a part of the current one."""
    span = _current.get()
    if span is not None and other is not None and span is not other:
        span.link(other)


def headers_onwards(given: Mapping[str, str] | None) -> dict[str, str] | None:
    """What to tell the next process of the trace: the current span, or else what was given."""
    span = _current.get()
    return (span.headers() if span is not None else clean(given or {})) or None


def clean(headers: Mapping[str, str]) -> dict[str, str]:
    """The usable part of a trace context that a stranger gave; empty if there is none."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if len(parent) > LONGEST_PARENT or not _PARENT.fullmatch(parent):
        return {}
    if not state or len(state) > LONGEST_STATE or not _STATE.fullmatch(state):
        return {"traceparent": parent}
    return {"traceparent": parent, "tracestate": state}


def of_http(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The trace context in the headers of an HTTP request, whose names are in lower case.

    One that has several parents has none; several states are one, as W3C says.
    """
    parents = [value for name, value in headers if name == b"traceparent"]
    states = [value for name, value in headers if name == b"tracestate"]
    if len(parents) != 1 or sum(map(len, states)) > LONGEST_STATE:
        states = []
    return clean(
        {
            "traceparent": parents[0].decode("latin-1") if len(parents) == 1 else "",
            "tracestate": b",".join(states).decode("latin-1"),
        }
    )


@contextmanager
def exporting(endpoint: str | None, instance: str) -> Iterator[None]:
    """Trace inside of this to an endpoint that :func:`prepare` has taken; without one nothing
    happens."""
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
    """See, before anything is started, that spans can be exported; and let vLLM's, in this process
    and its children, go the same way under the same name, by role (``frontend`` or ``worker``).

    Raises ConfigurationError: they can't be.
    """
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

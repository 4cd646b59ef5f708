"""Spans by OpenTelemetry, exported by OTLP. Imported only if traces are enabled.

As in ``vllm serve``, the endpoint is a flag and OpenTelemetry's variables set the rest
(``OTEL_SERVICE_NAME``, ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``, ``OTEL_TRACES_SAMPLER`` and so on).
The provider is our own, not the global one, which vLLM sets for its engine's spans.

A thread exports the spans. A slow or missing collector costs the spans, and a limited wait of a few
seconds at exit.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.errors import ConfigurationError
from common.observability.telemetry import SPANS
from common.observability.tracing import MAX_STATE_LEN, Kind, Span, Value, install

logger = logging.getLogger(__name__)

CLOSE_S: Final = 3.0  # how long the end of a process may wait for a collector

_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GRPC: Final = "grpc"
_HTTP: Final = "http/protobuf"
_QUEUE: Final = 2048
"""Spans that wait for export, as OpenTelemetry has it unless OTEL_BSP_MAX_QUEUE_SIZE says else; of
more the oldest are dropped."""

_BATCH: Final = 512  # spans that are sent at once

_KINDS: Final = {
    Kind.INTERNAL: trace.SpanKind.INTERNAL,
    Kind.SERVER: trace.SpanKind.SERVER,
    Kind.CLIENT: trace.SpanKind.CLIENT,
}
_W3C: Final = TraceContextTextMapPropagator()


class OtelSpan:
    """See :class:`common.observability.tracing.Span`."""

    __slots__ = ("_ended", "_span", "_sums", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._sums: dict[str, int] = {}
        self._ended = False

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def span_id(self) -> str:
        return f"{self._span.get_span_context().span_id:016x}"

    def child(
        self,
        name: str,
        kind: Kind = Kind.INTERNAL,
        attributes: Mapping[str, Value] | None = None,
    ) -> "OtelSpan":
        context = trace.set_span_in_context(self._span, Context())
        span = self._tracer.start_span(name, context, _KINDS[kind], attributes)
        return OtelSpan(self._tracer, span)

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def add(self, name: str, amount: int) -> None:
        self._sums[name] = self._sums.get(name, 0) + amount
        self._span.set_attribute(name, self._sums[name])

    def event(self, name: str, attributes: Mapping[str, Value]) -> None:
        self._span.add_event(name, attributes)

    def link(self, other: Span) -> None:
        if isinstance(other, OtelSpan) and other is not self:
            self._span.add_link(other._span.get_span_context())

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(self._span, Context()))
        if len(carrier.get("tracestate", "")) > MAX_STATE_LEN:  # set by a sampler, for example
            del carrier["tracestate"]
        return carrier

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def end(self, error: str | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class OtelTracer:
    """See :class:`common.observability.tracing.Tracer`."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("mmrouter")

    def begin(self, name: str, kind: Kind, headers: Mapping[str, str]) -> OtelSpan:
        context = _W3C.extract(headers, Context())
        return OtelSpan(self._tracer, self._tracer.start_span(name, context, _KINDS[kind]))


class CountingExporter(SpanExporter):
    """Counts spans by outcome, and logs once that the collector does not take them."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:  # an error goes to OpenTelemetry's thread, which passes over it
            done = result is SpanExportResult.SUCCESS
            SPANS.labels("exported" if done else "failed").inc(len(spans))
            self._say(failing=not done)
        return result

    def _say(self, *, failing: bool) -> None:
        if failing and not self._failing:
            logger.warning("the collector does not take spans: see mmrouter_spans_total")
        elif self._failing and not failing:
            logger.info("the collector takes spans again")
        self._failing = failing

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Export:
    """Tracing of this process, until :meth:`close`."""

    def __init__(self, endpoint: str, instance: str) -> None:
        """Export to an endpoint; ``instance`` becomes ``service.instance.id``."""
        # Logged once by us; OpenTelemetry would log each retry.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        try:
            exporter = _exporter(endpoint)
        except (ValueError, OSError) as error:
            where = _shown(endpoint)
            raise ConfigurationError(f"spans can't be exported to {where}: {error}") from error
        self._provider = _provider(exporter, instance)
        install(OtelTracer(self._provider))
        logger.info("spans go to %s", _shown(endpoint))

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Export the remaining spans within ``limit_s``. vLLM's exporter gets the same limit: at
        exit it would wait 30 s for an unreachable collector."""
        install(None)
        ends = [threading.Thread(target=self._provider.shutdown, daemon=True)]
        vllms = trace.get_tracer_provider()
        if isinstance(vllms, TracerProvider):
            atexit.unregister(vllms.shutdown)
            ends.append(threading.Thread(target=vllms.shutdown, daemon=True))
        for thread in ends:
            thread.start()
        until = time.monotonic() + limit_s
        for thread in ends:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in ends):
            logger.warning("the collector has not taken the last spans within %g s", limit_s)


def prepare_environment(endpoint: str, role: str) -> None:
    """Configure all exporters of this process and its children. Raises ConfigurationError."""
    # vLLM knows the first name only, and defaults to grpc.
    protocol = next((said for name in _PROTOCOLS if (said := os.environ.get(name))), _GRPC)
    if protocol not in (_GRPC, _HTTP):
        raise ConfigurationError(
            f"spans can't be sent by {protocol!r}: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {_GRPC}, "
            f"the default, or {_HTTP}"
        )
    if protocol == _HTTP and not endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"--otlp-traces-endpoint={_shown(endpoint)} is no URL for {_HTTP}, which is like "
            "http://HOST:4318/v1/traces"
        )
    os.environ[_PROTOCOLS[0]] = protocol
    if "service.name" not in OTELResourceDetector().detect().attributes:
        os.environ["OTEL_SERVICE_NAME"] = f"mmrouter-{role}"
    _provider(None, "").shutdown()


def _shown(endpoint: str) -> str:
    """Remove a password."""
    return endpoint.rpartition("@")[2]


def _exporter(endpoint: str) -> SpanExporter:
    """Return the exporter that vLLM makes of an endpoint. Raises ValueError or OSError."""
    if os.environ[_PROTOCOLS[0]] == _HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter
    from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException

    insecure = not endpoint.startswith("https://")
    try:
        return trace_exporter.OTLPSpanExporter(endpoint, insecure=insecure)
    except InvalidCompressionValueException as error:  # not a ValueError, unlike all other errors
        raise ValueError(str(error)) from error


def _provider(exporter: SpanExporter | None, instance: str) -> TracerProvider:
    """Return a provider by OpenTelemetry's variables. Raises ConfigurationError."""
    resource = Resource.create({"service.instance.id": instance})
    try:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        if exporter is not None:
            most = _queue_size()
            batches = BatchSpanProcessor(CountingExporter(exporter), most, None, min(most, _BATCH))
            provider.add_span_processor(batches)
    except ValueError as error:
        raise ConfigurationError(f"an OTEL_ variable is unusable: {error}") from error
    return provider


def _queue_size() -> int:
    said = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    return int(said) if said.isascii() and said.isdigit() and int(said) > 0 else _QUEUE

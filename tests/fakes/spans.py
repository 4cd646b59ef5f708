"""Spans that are kept instead of exported."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from common.observability.otel import OtelTracer
from common.observability.tracing import install


class Recorded:
    """What has ended so far."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    @property
    def spans(self) -> list[ReadableSpan]:
        """In the order of their ends."""
        return list(self._exporter.get_finished_spans())

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def parent(self, span: ReadableSpan) -> str:
        """The name of its parent; empty if that is not here."""
        if span.parent is None:
            return ""
        ids = {one.context.span_id: one.name for one in self.spans if one.context is not None}
        return ids.get(span.parent.span_id, "")

    def traces(self) -> set[int]:
        return {span.context.trace_id for span in self.spans if span.context is not None}


@contextmanager
def recorded_spans(sampler: Sampler | None = None) -> Iterator[Recorded]:
    """This process traces inside of this, frontends and workers alike."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    install(OtelTracer(provider))
    try:
        yield Recorded(exporter)
    finally:
        install(None)

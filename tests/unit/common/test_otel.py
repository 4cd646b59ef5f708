"""What becomes of spans: a collector takes them by either protocol, or is slow, mute or gone."""

import asyncio
import builtins
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from prometheus_client import REGISTRY

from common.errors import ConfigurationError
from common.observability import otel, tracing
from common.observability.telemetry import stage
from common.observability.tracing import exporting, prepare, span_of_request
from tests.fakes.collector import Collector, attributes, grpc_collector, http_collector
from tests.waiting import until

NOBODY = "http://127.0.0.1:9/v1/traces"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name in ("OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile goes afterwards
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    level = logging.getLogger("opentelemetry").level
    yield monkeypatch
    logging.getLogger("opentelemetry").setLevel(level)


def count(outcome: str) -> float:
    return REGISTRY.get_sample_value("mmrouter_spans_total", {"outcome": outcome}) or 0


class Counted:
    """What was added since it was made."""

    def __init__(self) -> None:
        self._before = {name: count(name) for name in ("exported", "failed")}

    def __getitem__(self, outcome: str) -> float:
        return count(outcome) - self._before[outcome]


def make_spans(number: int = 1) -> None:
    for _ in range(number):
        with span_of_request("request", {}), stage("select"):
            pass


@pytest.mark.parametrize(
    ("collector", "protocol"), [(http_collector, "http/protobuf"), (grpc_collector, "grpc")]
)
async def test_a_collector_gets_them(
    collector: Callable[[], AbstractContextManager[Collector]],
    protocol: str,
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    counted = Counted()
    with collector() as there:
        prepare(there.endpoint, "frontend")
        with exporting(there.endpoint, "frontend 0"):
            make_spans()
            await until(lambda: len(there.spans) == 2)
            assert there.services == {"mmrouter-frontend": {"request", "select"}}
            make_spans()
        assert len(there.spans) == 4, "the last ones are sent at the end"
        assert "frontend 0" in there.text()
    assert counted["exported"] == 4 and counted["failed"] == 0
    assert not tracing.enabled()


async def test_opentelemetrys_own_variables_are_followed(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_SERVICE_NAME", "mine")
    environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod")
    environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    environment.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=1")
    with http_collector() as there:
        prepare(there.endpoint, "worker")
        assert os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf", "for vLLM's"
        with exporting(there.endpoint, "w0"):
            make_spans(3)
            with span_of_request("wanted", {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}):
                pass
        assert there.services == {"mine": {"wanted"}}
        assert "prod" in there.text()
        (span,) = there.spans
        assert span.parent_span_id.hex() == "b" * 16 and attributes(span) == {}


def test_a_sampler_that_asks_nobody_overrules_the_client(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    prepare(NOBODY, "frontend")
    with exporting(NOBODY, "f"):
        parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        with span_of_request("request", parent) as span:
            assert span is not None and not span.recording


@pytest.mark.parametrize(
    ("endpoint", "environ", "reason"),
    [
        (NOBODY, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "be sent by 'http/json'"),
        ("localhost:4317", {}, "=localhost:4317 is no URL for http/protobuf"),
        ("user:secret@host", {}, "=host is no URL"),
        (
            NOBODY,
            {"OTEL_EXPORTER_OTLP_COMPRESSION": "rar", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            "be exported to http.*rar",
        ),
        (NOBODY, {"OTEL_BSP_SCHEDULE_DELAY": "-1"}, "an OTEL_ variable is unusable"),
    ],
)
def test_what_can_not_be_is_said_in_a_sentence(
    endpoint: str, environ: dict[str, str], reason: str, environment: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        environment.setenv(name, value)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        prepare(endpoint, "frontend")
        otel.Export(endpoint, "f").close(0)
    assert "secret" not in str(caught.value)
    assert not tracing.enabled()


@pytest.mark.parametrize("size", ["x", "-1", "0", "\u0663", ""])
def test_a_queue_of_no_size_is_as_large_as_without_one(
    size: str, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("OTEL_BSP_MAX_QUEUE_SIZE", size)
    prepare(NOBODY, "frontend")
    with exporting(NOBODY, "f"):
        pass


def test_without_the_package_a_flag_is_refused_and_nothing_else(
    environment: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith(("opentelemetry", "common.observability.otel")):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **more)

    environment.setattr(builtins, "__import__", without)
    prepare(None, "frontend")
    with exporting(None, "f"):
        make_spans()
    with pytest.raises(ConfigurationError, match=r"pip install opentelemetry-sdk"):
        prepare(NOBODY, "frontend")


def test_a_collector_that_is_gone_costs_a_count(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    counted = Counted()
    prepare(NOBODY, "frontend")
    with caplog.at_level("DEBUG"), exporting(NOBODY, "f"):
        make_spans(10)
    assert counted["failed"] == 20 and counted["exported"] == 0
    said = [line for line in caplog.records if line.levelname in ("WARNING", "ERROR")]
    assert [line.getMessage() for line in said] == [
        "the collector does not take spans: see mmrouter_spans_total"
    ]


async def test_a_collector_that_is_mute_holds_nobody_up(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    environment.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with http_collector() as there:
        there.answers.clear()
        prepare(there.endpoint, "frontend")
        export = otel.Export(there.endpoint, "f")
        make_spans(50)
        await until(there.asked.is_set)
        make_spans(50)  # for which there is no room
        export.close(0.5)
        assert "has not taken the last spans within 0.5 s" in caplog.text
        there.answers.set()


async def test_a_collector_that_comes_back_is_used_again(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted()
    with caplog.at_level("INFO"), http_collector() as there:
        there.status = 400  # one that is not tried again
        prepare(there.endpoint, "frontend")
        with exporting(there.endpoint, "f"):
            make_spans()
            await until(lambda: counted["failed"] == 2)
            there.status = 200
            make_spans()
            await until(lambda: counted["exported"] == 2)
            assert len(there.spans) == 2
    assert "the collector takes spans again" in caplog.text


async def test_an_exporter_that_raises_is_a_failure() -> None:
    class Broken(SpanExporter):
        def export(self, spans: object) -> Any:
            raise RuntimeError("canary")

    counted = Counted()
    processor = BatchSpanProcessor(otel.CountingExporter(Broken()))
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracing.install(otel.OtelTracer(provider))
    try:
        for _ in range(10):
            make_spans(2)
            assert processor.force_flush()
    finally:
        tracing.install(None)
        provider.shutdown()
    assert counted["failed"] == 40


def test_vllms_exporter_in_this_process_has_the_same_limit(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM would wait at exit for 30 s."""
    environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with http_collector() as there:
        there.answers.clear()
        prepare(there.endpoint, "worker")
        vllms = TracerProvider()
        vllms.add_span_processor(BatchSpanProcessor(otel._exporter(there.endpoint)))
        environment.setattr(trace, "get_tracer_provider", lambda: vllms)
        vllms.get_tracer("vllm").start_span("llm_request").end()
        export = otel.Export(there.endpoint, "w0")
        export.close(0.5)
        assert "has not taken the last spans" in caplog.text
        there.answers.set()


async def test_a_fork_exports_nothing_of_its_parents(environment: pytest.MonkeyPatch) -> None:
    """vLLM forks; and its children must not wait for a lock that one of our threads had."""
    with http_collector() as there:
        prepare(there.endpoint, "worker")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
        export = otel.Export(there.endpoint, "w0")
        make_spans(3)
        child = os.fork()
        if not child:
            try:
                with span_of_request("of the child", {}):
                    pass
                export.close(30.0)
            finally:
                os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert status == 0
        assert [span.name for span in there.spans] == ["of the child"]
        export.close(30.0)
        assert len(there.spans) == 7


def test_spans_that_end_twice_or_late_do_no_harm() -> None:
    prepare(NOBODY, "frontend")
    with exporting(NOBODY, "f"), span_of_request("request", {}) as span:
        assert span is not None
        late = span.child("late")
        span.end("500")
        span.end()
        span.add("tokens", 1)
    late.set({"a": 1})
    late.end()

"""What all metrics have in common: names, units, labels that nobody outside chooses."""

import re
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.buckets import histogram_buckets

from common.observability import telemetry
from common.observability.live_metrics import Asked
from setup.metrics_page import Declared, declared

METRICS = declared()

LABELS = {
    *("worker_id", "rank", "stage", "error", "outcome", "reason", "side", "result", "transport"),
    *("how", "source", "deadline", "field", "socket", "where", "task", "state", "whose"),
    *("knowledge", "role", "model", "place"),
}
"""Each has a few values that this code knows, or as many as there are workers and ranks."""


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_units_and_labels(metric: Declared) -> None:
    assert re.fullmatch(r"mmrouter_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert not re.search(r"_(ms|us|ns|milliseconds|mb|gb|kb|percent)(_|$)", metric.name)
    assert metric.type != "histogram" or metric.unit == "seconds"
    assert metric.documentation and not metric.documentation.endswith(".")
    assert set(metric.labels) <= LABELS


def of_workers() -> Iterator[object]:
    for metric in vars(telemetry).values():
        names = getattr(metric, "_labelnames", ())
        if "worker_id" in names and not isinstance(metric, Asked):
            yield metric


def test_all_that_is_said_of_a_worker_can_be_forgotten() -> None:
    assert set(of_workers()) == set(telemetry._OF_ONE_WORKER)
    for name in ("goes", "stays"):
        telemetry.TENSOR_BYTES.labels(name, "shm").inc()
        telemetry.DECISIONS.labels(name, "cost").inc()
    telemetry.forget_worker("goes")
    page = generate_latest(REGISTRY).decode()
    assert '"goes"' not in page
    assert page.count('mmrouter_decisions_total{reason="cost",worker_id="stays"} 1.0') == 1
    telemetry.forget_worker("stays")
    telemetry.forget_worker("was never there")


@pytest.mark.parametrize(
    ("family", "ours"),
    [
        ("time_to_first_token", telemetry.FIRST_TOKEN_S),
        ("inter_token_latency", telemetry.BETWEEN_TOKENS_S),
        ("request_latency", telemetry.REQUEST_S),
    ],
)
def test_edges_are_those_of_vllm(family: str, ours: tuple[float, ...]) -> None:
    assert histogram_buckets(family) == list(ours)


def test_a_stage_is_timed_and_its_errors_are_counted() -> None:
    name = "of this test"
    labels = {"stage": name}
    with telemetry.stage(name):
        pass
    with pytest.raises(KeyError), telemetry.stage(name):
        raise KeyError
    assert REGISTRY.get_sample_value("mmrouter_stage_seconds_count", labels) == 2
    failed = {**labels, "error": "KeyError"}
    assert REGISTRY.get_sample_value("mmrouter_stage_failures_total", failed) == 1

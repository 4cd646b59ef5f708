"""Metrics of our own making read as prometheus_client's do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from common.observability.live_metrics import Asked, Described, QuickHistogram, Row

EDGES = (0.01, 0.5, 1.0, 10.0)


@given(st.lists(st.floats(0, 100) | st.sampled_from(EDGES), max_size=20))
def test_a_quick_histogram_counts_as_the_slow_one(values: list[float]) -> None:
    quick, slow = CollectorRegistry(), CollectorRegistry()
    ours = QuickHistogram("took_seconds", "how long", EDGES, quick)
    theirs = Histogram("took_seconds", "how long", buckets=EDGES, registry=slow)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    lines = [line for line in generate_latest(slow).decode().splitlines() if "_created" not in line]
    assert generate_latest(quick).decode().splitlines() == lines


def test_a_value_may_count_for_several() -> None:
    registry = CollectorRegistry()
    QuickHistogram("took_seconds", "how long", EDGES, registry).observe(0.25, 4)
    assert registry.get_sample_value("took_seconds_count") == 4
    assert registry.get_sample_value("took_seconds_sum") == 1.0
    assert registry.get_sample_value("took_seconds_bucket", {"le": "0.01"}) == 0
    assert registry.get_sample_value("took_seconds_bucket", {"le": "0.5"}) == 4


def test_what_is_gone_is_not_shown() -> None:
    registry = CollectorRegistry()
    there = {"a": (1.0, 2.0), "b": (3.0, None)}
    asked = Asked(
        ("name",),
        Described(CounterMetricFamily, "seen", "how often"),
        Described(GaugeMetricFamily, "held", "how much"),
        registry=registry,
    )
    assert registry.get_sample_value("seen_total", {"name": "a"}) is None
    asked.set_function(lambda: [Row((name,), values) for name, values in there.items()])
    assert registry.get_sample_value("seen_total", {"name": "a"}) == 1
    assert registry.get_sample_value("seen_total", {"name": "b"}) == 3
    assert registry.get_sample_value("held", {"name": "b"}) is None
    del there["a"]
    assert registry.get_sample_value("seen_total", {"name": "a"}) is None
    assert "# TYPE held gauge" in generate_latest(registry).decode()


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    QuickHistogram("took_seconds", "how long", EDGES, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        QuickHistogram("took_seconds", "again", EDGES, registry)

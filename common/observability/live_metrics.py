"""Metrics where prometheus_client is too slow, or keeps the labels of removed objects."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


class QuickHistogram(Collector):
    """Histogram without labels, for events at every token. Observed on one thread, so it needs no
    lock: a fifth of prometheus_client's time (command in ``docs/metrics.md``)."""

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """``buckets`` are upper edges, ascending, without infinity."""
        self._name = name
        self._documentation = documentation
        self._edges = tuple(buckets)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._edges, value)] += times
        self._sum += value * times

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        edges = [*map(floatToGoString, self._edges), "+Inf"]
        counted = list(zip(edges, map(float, accumulate(self._counts)), strict=True))
        (family,) = self.describe()
        family.add_metric([], counted, self._sum)
        return [family]


class Described(NamedTuple):
    """One metric."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    documentation: str


class Row(NamedTuple):
    """Values under one set of labels, in the order of the metrics; None for a missing one."""

    labels: Sequence[str]
    values: Sequence[float | None]


class Asked(Collector):
    """Metrics with common labels, computed on read, so that removed objects disappear."""

    def __init__(
        self,
        labels: Sequence[str],
        *described: Described,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.labels = tuple(labels)
        self._described = described
        self._ask: Callable[[], Iterable[Row]] = tuple
        registry.register(self)

    def set_function(self, ask: Callable[[], Iterable[Row]]) -> None:
        """Set the function that returns the rows, on the reader's thread."""
        self._ask = ask

    def describe(self) -> Iterable[Family]:
        return [
            family(name, documentation, labels=self.labels)
            for family, name, documentation in self._described
        ]

    def collect(self) -> Iterator[Family]:
        families = list(self.describe())
        for labels, values in self._ask():
            for family, value in zip(families, values, strict=True):
                if value is not None:
                    family.add_metric(labels, value)
        yield from families

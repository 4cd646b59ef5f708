"""``python setup/metrics_page.py FILE``: writes the page on all metrics."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from common.observability import telemetry
from common.observability.live_metrics import Asked, QuickHistogram

_UNITS: Final = ("seconds", "bytes", "tokens", "pixels", "ratio")

_BEGIN: Final = "<!-- Made by `make docs` from common/observability/telemetry.py: change that. -->"
_END: Final = "<!-- End of what is made. -->"


class Declared(NamedTuple):
    """A metric as it is declared.

    Attributes:
        name: as queries have it; histograms without ``_bucket`` and its like.
        unit: empty for numbers of things.
    """

    name: str
    type: str
    labels: tuple[str, ...]
    unit: str
    documentation: str


def declared() -> list[Declared]:
    """All metrics of the product, by name."""
    found = (each for one in vars(telemetry).values() for each in _declared(one))
    return sorted(found)


def _declared(collector: object) -> Iterator[Declared]:
    match collector:
        case MetricWrapperBase():
            labels = tuple(collector._labelnames)
        case Asked():
            labels = collector.labels
        case QuickHistogram():
            labels = ()
        case _:
            return
    for metric in collector.describe():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        yield Declared(name, metric.type, labels, _unit(metric), metric.documentation)


def _unit(metric: Metric) -> str:
    words = metric.name.split("_")
    return next((unit for unit in _UNITS if unit in words), "")


def table() -> str:
    """A row for each metric."""
    rows = ["| metric | type | labels | unit | |", "|---|---|---|---|---|"]
    for name, kind, labels, unit, text in declared():
        names = ", ".join(f"`{label}`" for label in labels)
        rows.append(f"| `{name}` | {kind} | {names} | {unit} | {text} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """A page with the table where it belongs."""
    made = f"{_BEGIN}\n\n{table()}\n\n{_END}"
    return re.sub(re.escape(_BEGIN) + ".*?" + re.escape(_END), lambda _: made, page, flags=re.S)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_table(file.read_text()))

"""Medians, spreads and quantiles, as benchmarks tell them."""

import statistics
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the others lie."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Median, least and most."""
    three = (statistics.median(values), min(values), max(values))
    median, least, most = (f"{value:.{digits}g}" for value in three)
    return f"{median} ({least} to {most})"

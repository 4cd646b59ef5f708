"""The line of JSON at the end: what it has, and why something is missing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from tests.benchmarks.serving.contenders import CACHE_AWARE, DATA_PARALLEL, KV, ROUND_ROBIN
from tests.benchmarks.serving.figures import Figures
from tests.benchmarks.serving.verdict import Verdict

Value: TypeAlias = float | str | list[str] | Mapping[str, str] | None

THROUGHPUT: Final = "requests_per_s"
FIRST: Final = "first_token_ms"


@dataclass(frozen=True)
class Headline:
    """A figure of the JSON.

    Attributes:
        loads: beginnings of names: the first load of a run that has the first of them, or the
            next, shows the figure.
        read: takes it from a race.
    """

    name: str
    loads: Sequence[str]
    read: Callable[[Verdict], float | None]

    def verdict(self, verdicts: Sequence[Verdict]) -> Verdict | None:
        """The race that shows it."""
        for beginning in self.loads:
            for each in verdicts:
                if each.load.startswith(beginning) and not each.refused:
                    return each
        return None


def _ratio(one: str, other: str, column: str, verdict: Verdict) -> float | None:
    return verdict.ratio(one, other, column)


def _median(contender: str, column: str, verdict: Verdict) -> float | None:
    return verdict.median(contender, column)


_REUSE: Final = ("pictures-4@", "pictures-", "chats@")
_TEXT: Final = ("text@",)
_TOKENS: Final = ("streams@",)
_NEW: Final = ("pictures-1@",)

HEADLINES: Final = (
    Headline("kv_vs_rr_throughput", _REUSE, partial(_ratio, KV, ROUND_ROBIN, THROUGHPUT)),
    Headline("kv_vs_rr_ttft_p50", _REUSE, partial(_ratio, KV, ROUND_ROBIN, f"{FIRST}_p50")),
    Headline("kv_vs_rr_ttft_p99", _REUSE, partial(_ratio, KV, ROUND_ROBIN, f"{FIRST}_p99")),
    Headline("vs_dp_throughput", _REUSE, partial(_ratio, KV, DATA_PARALLEL, THROUGHPUT)),
    Headline("vs_dp_ttft_p50", _REUSE, partial(_ratio, KV, DATA_PARALLEL, f"{FIRST}_p50")),
    Headline("vs_router_throughput", _REUSE, partial(_ratio, KV, CACHE_AWARE, THROUGHPUT)),
    Headline("vs_router_ttft_p50", _REUSE, partial(_ratio, KV, CACHE_AWARE, f"{FIRST}_p50")),
    Headline("text_vs_router_ttft_p50", _TEXT, partial(_ratio, KV, CACHE_AWARE, f"{FIRST}_p50")),
    Headline("frontend_us_per_token", _TOKENS, partial(_median, KV, "frontend_us_per_token")),
    Headline("worker_us_per_token", _TOKENS, partial(_median, KV, "worker_us_per_token")),
    Headline(
        "api_server_us_per_token",
        _TOKENS,
        partial(_median, DATA_PARALLEL, "api_server_us_per_token"),
    ),
    Headline("frontend_ms_per_picture", _NEW, partial(_median, KV, "frontend_ms_per_request")),
)

NOT_RACED: Final = ("vs_dynamo_throughput", "vs_dynamo_ttft_p50", "frontend_cpu_vs_dynamo")
"""Dynamo is no contender here yet."""


def headline(verdicts: Sequence[Verdict], missing: Mapping[str, str]) -> dict[str, Value]:
    """All figures; those that were not measured are None, and ``reasons`` says why.

    Args:
        missing: contenders that did not race, and why.
    """
    figures: Figures = {}
    loads: dict[str, str] = {}
    reasons = dict.fromkeys(NOT_RACED, "Dynamo is not raced")
    figures |= dict.fromkeys(NOT_RACED)
    for each in HEADLINES:
        verdict = each.verdict(verdicts)
        value = each.read(verdict) if verdict else None
        figures[each.name] = None if value is None else round(value, 4)
        if value is not None and verdict:
            loads[each.name] = verdict.load
        elif verdict:
            reasons[each.name] = "a contender that it compares did not race"
        else:
            reasons[each.name] = f"no race counts whose load is {' or '.join(each.loads)}…"
    worst, where = _worst(verdicts)
    figures["worst_vs_rr_throughput"] = worst
    if where:
        loads["worst_vs_rr_throughput"] = where
    else:
        reasons["worst_vs_rr_throughput"] = f"{KV} and {ROUND_ROBIN} did not race"
    refused = {each.load: each.refused for each in verdicts if each.refused}
    return {**figures, "loads": loads, "reasons": reasons, "missing": missing, "refused": refused}


def _worst(verdicts: Sequence[Verdict]) -> tuple[float | None, str | None]:
    """The least throughput over round-robin's, and the load where that was."""
    ratios = [
        (ratio, each.load)
        for each in verdicts
        if (ratio := each.ratio(KV, ROUND_ROBIN, THROUGHPUT)) is not None
    ]
    if not ratios:
        return None, None
    ratio, where = min(ratios)
    return round(ratio, 4), where

"""The line of JSON at the end: what it has, and why something is missing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from tests.benchmarks.serving.contenders import (
    DATA_PARALLEL,
    DYNAMO,
    KV,
    ROUND_ROBIN,
    ROUTERS,
)
from tests.benchmarks.serving.traffic import OPEN
from tests.benchmarks.serving.verdict import Verdict

Value: TypeAlias = float | Mapping[str, str] | Mapping[str, int] | None

THROUGHPUT: Final = "requests_per_s"
P50: Final = "first_token_ms_p50"
P99: Final = "first_token_ms_p99"

Read: TypeAlias = Callable[[Verdict], float | None]


@dataclass(frozen=True)
class Headline:
    """A figure of the JSON.

    Attributes:
        kinds: the first race of a run whose load is of the first kind, or of the next, shows it.
        open_first: whether a race at a rate shows it rather than one that saturates.
        who: the contender whose figure it is.
        rivals: those that it is compared with, if it is; one of them is enough.
        read: takes it from a race.
    """

    name: str
    kinds: Sequence[str]
    open_first: bool
    who: str
    rivals: Sequence[str]
    read: Read

    def verdict(self, verdicts: Sequence[Verdict]) -> Verdict | None:
        """The race that shows it."""
        for kind in self.kinds:
            found = [
                each
                for each in verdicts
                if each.load.startswith(kind) and self.read(each) is not None
            ]
            found.sort(key=lambda each: each.load.endswith(OPEN) != self.open_first)
            if found:
                return found[0]
        return None

    def reason(self, missing: Mapping[str, str], refused: Mapping[str, str]) -> str:
        """Why no race shows it."""
        for some in ([self.who], self.rivals):
            if some and all(name in missing for name in some):
                return f"{some[0]} did not race: {missing[some[0]]}"
        for name, why in refused.items():
            if name.startswith(tuple(self.kinds)):
                return f"{name} was refused: {why}"
        who = " and ".join(filter(None, (self.who, " or ".join(self.rivals))))
        kinds = " or ".join(f"{kind}…" for kind in self.kinds)
        return f"no race of {who} with a load {kinds}"


def _least(column: str, rivals: Sequence[str], verdict: Verdict) -> float | None:
    """Over the best rival, where more is better."""
    return min(_ratios(column, rivals, verdict), default=None)


def _most(column: str, rivals: Sequence[str], verdict: Verdict) -> float | None:
    """Over the best rival, where less is better."""
    return max(_ratios(column, rivals, verdict), default=None)


def _ratios(column: str, rivals: Sequence[str], verdict: Verdict) -> list[float]:
    ratios = (verdict.ratio(KV, rival, column) for rival in rivals)
    return [ratio for ratio in ratios if ratio is not None]


def _median(contender: str, column: str, verdict: Verdict) -> float | None:
    return verdict.median(contender, column)


_REUSE: Final = ("pictures-4@", "pictures-", "groups@", "documents@", "chats@")
_TEXT: Final = ("text@",)
_TOKENS: Final = ("streams@",)
_NEW: Final = ("pictures-1@",)


def _faster(name: str, *rivals: str) -> Headline:
    return Headline(name, _REUSE, False, KV, rivals, partial(_least, THROUGHPUT, rivals))


def _sooner(name: str, column: str, kinds: Sequence[str], *rivals: str) -> Headline:
    return Headline(name, kinds, True, KV, rivals, partial(_most, column, rivals))


def _cost(name: str, kinds: Sequence[str], contender: str, column: str) -> Headline:
    return Headline(name, kinds, False, contender, (), partial(_median, contender, column))


HEADLINES: Final = (
    _faster("kv_vs_rr_throughput", ROUND_ROBIN),
    _sooner("kv_vs_rr_ttft_p50", P50, _REUSE, ROUND_ROBIN),
    _sooner("kv_vs_rr_ttft_p99", P99, _REUSE, ROUND_ROBIN),
    _faster("vs_dynamo_throughput", DYNAMO),
    _sooner("vs_dynamo_ttft_p50", P50, _REUSE, DYNAMO),
    _faster("vs_router_throughput", *ROUTERS),
    _sooner("vs_router_ttft_p50", P50, _REUSE, *ROUTERS),
    _faster("vs_dp_throughput", DATA_PARALLEL),
    _sooner("vs_dp_ttft_p50", P50, _REUSE, DATA_PARALLEL),
    _sooner("text_vs_router_ttft_p50", P50, _TEXT, *ROUTERS),
    _cost("frontend_us_per_token", _TOKENS, KV, "frontend_us_per_token"),
    _cost("worker_us_per_token", _TOKENS, KV, "worker_us_per_token"),
    _cost("api_server_us_per_token", _TOKENS, DATA_PARALLEL, "api_server_us_per_token"),
    _cost("frontend_ms_per_picture", _NEW, KV, "frontend_ms_per_request"),
    Headline(
        "frontend_cpu_vs_dynamo",
        _REUSE,
        False,
        KV,
        (DYNAMO,),
        partial(_most, "frontend_ms_per_request", (DYNAMO,)),
    ),
)

WORST: Final = "worst_vs_rr_throughput"


def headline(
    verdicts: Sequence[Verdict], missing: Mapping[str, str], wrong: Mapping[str, int]
) -> dict[str, Value]:
    """All figures; those that were not measured are None, and ``reasons`` says why.

    Args:
        missing: contenders that did not race, and why.
        wrong: of each contender, how many answers differ from those of the first.
    """
    figures: dict[str, float | None] = {}
    loads: dict[str, str] = {}
    reasons: dict[str, str] = {}
    refused = {each.load: each.refused for each in verdicts if each.refused}
    for each in HEADLINES:
        verdict = each.verdict(verdicts)
        value = each.read(verdict) if verdict else None
        figures[each.name] = None if value is None else round(value, 4)
        if verdict:
            loads[each.name] = verdict.load
        else:
            reasons[each.name] = each.reason(missing, refused)
    worst = _worst(verdicts)
    figures[WORST] = round(worst[0], 4) if worst else None
    if worst:
        loads[WORST] = worst[1]
    else:
        reasons[WORST] = f"no race of {KV} and {ROUND_ROBIN} counts"
    return {
        **figures,
        "loads": loads,
        "reasons": reasons,
        "missing": missing,
        "refused": refused,
        "answers_that_differ": wrong,
    }


def _worst(verdicts: Sequence[Verdict]) -> tuple[float, str] | None:
    """The least throughput over round-robin's, and the load where that was."""
    ratios = [
        (ratio, each.load)
        for each in verdicts
        if (ratio := each.ratio(KV, ROUND_ROBIN, THROUGHPUT)) is not None
    ]
    return min(ratios, default=None)

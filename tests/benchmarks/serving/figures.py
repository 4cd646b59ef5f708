"""What a block showed, in numbers."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.benchmarks.fleet_clients import Whole
from tests.benchmarks.serving.bound import Work, bound_seconds
from tests.benchmarks.serving.contenders import Role
from tests.benchmarks.serving.counters import Counters
from tests.benchmarks.serving.engines import Engines
from tests.benchmarks.serving.traffic import Closed, Pace
from tests.benchmarks.spread import quantile
from tests.simgpu.stats import Stats
from tests.simgpu.totals import LATE_SHARE, late_share

Figures = dict[str, float | None]


@dataclass(frozen=True)
class Limits:
    """What users bear, in milliseconds: until the first token, and between tokens on average."""

    first_ms: float
    between_ms: float


@dataclass(frozen=True)
class Block:
    """What was measured in one block of one contender.

    Attributes:
        number: of the round.
        work: what was asked.
        engines: what they did meanwhile.
        engines: what they did meanwhile; None of real ones, which don't say.
        cpu: seconds by role.
        counted: by the contender's servers.
    """

    contender: str
    number: int
    seconds: float
    answers: Sequence[Whole]
    work: Work
    engines: Stats | None
    cpu: Mapping[Role, float]
    counted: Counters

    @property
    def valid(self) -> bool:
        """Whether the engines kept to their model of time; real ones have none."""
        return self.late <= LATE_SHARE

    @property
    def late(self) -> float:
        """How late engines were, as a share of their modelled work."""
        return late_share(self.engines) if self.engines else 0.0


@dataclass(frozen=True)
class Setting:
    """What is the same for all blocks of a race."""

    engines: Engines
    pace: Pace
    limits: Limits


def gaps_s(answer: Whole) -> list[float]:
    """Seconds between the events of an answer that have tokens."""
    return [later - one for one, later in itertools.pairwise(answer.arrived_s)]


def is_good(answer: Whole, limits: Limits) -> bool:
    """Whether a user would bear it."""
    gaps = gaps_s(answer)
    between = statistics.fmean(gaps) if gaps else 0.0
    return answer.first_token_s * 1e3 <= limits.first_ms and between * 1e3 <= limits.between_ms


def figures_of(block: Block, setting: Setting) -> Figures:
    """Its figures, by the names that the CSV has. None is what nobody could say."""
    count = len(block.answers)
    tokens = sum(answer.tokens for answer in block.answers)
    good = sum(is_good(answer, setting.limits) for answer in block.answers)
    return {
        "requests_per_s": count / block.seconds,
        "tokens_per_s": tokens / block.seconds,
        "goodput_per_s": good / block.seconds,
        **_bound(block, setting),
        **_quantiles("first_token_ms", [answer.first_token_s for answer in block.answers]),
        **_quantiles("between_tokens_ms", [g for each in block.answers for g in gaps_s(each)]),
        "prompt_tokens": block.work.prompt_tokens / count,
        "cached_possible": block.work.cached_tokens / count,
        "cached_predicted": _over(block.counted.predicted, count),
        "cached_realised": _realised(block) / count,
        "processor_runs_per_picture": _over(block.counted.processor_runs, block.work.pictures),
        "moved_kb_per_request": _over(block.counted.moved_bytes, count * 1024),
        **_engines(block, setting),
        **dict(_cpu(block.cpu, count, tokens)),
    }


def _over(amount: float | None, count: int) -> float | None:
    return amount / count if amount is not None and count else None


def _realised(block: Block) -> float:
    """Cached tokens: as engines say, or as answers do, which not all servers fill in."""
    if block.engines:
        return block.engines.cached_tokens
    return sum(answer.cached_tokens for answer in block.answers)


def _bound(block: Block, setting: Setting) -> Figures:
    equal = setting.engines.slower == 1
    if not (isinstance(setting.pace, Closed) and setting.engines.gpu and equal):
        return {"bound_per_s": None, "of_bound": None}
    gpu, clients = setting.engines.gpu, setting.pace.clients
    possible = len(block.answers) / bound_seconds(block.work, gpu, setting.engines.count, clients)
    rate = len(block.answers) / block.seconds
    return {"bound_per_s": possible, "of_bound": rate / possible}


_OF_ENGINES: Final = (
    "encoder_runs_per_picture",
    "engines_busy",
    "engines_late",
    "engines_stalled",
    "steps",
)


def _engines(block: Block, setting: Setting) -> Figures:
    stats = block.engines
    if stats is None:
        return dict.fromkeys(_OF_ENGINES)
    return {
        "encoder_runs_per_picture": _over(stats.encoder_items, block.work.pictures),
        "engines_busy": stats.busy_seconds / setting.engines.count / block.seconds,
        "engines_late": block.late,
        "engines_stalled": stats.stall_seconds / stats.busy_seconds,
        "steps": stats.steps,
    }


def _cpu(cpu: Mapping[Role, float], count: int, tokens: int) -> Iterator[tuple[str, float | None]]:
    for role in Role:
        seconds = cpu.get(role)
        yield f"{role.value}_ms_per_request", None if seconds is None else seconds / count * 1e3
        yield f"{role.value}_us_per_token", None if seconds is None else seconds / tokens * 1e6


def _quantiles(name: str, seconds: Sequence[float]) -> Figures:
    return {
        f"{name}_p{share}": quantile(seconds, share / 100) * 1e3 if seconds else None
        for share in (50, 90, 99)
    }

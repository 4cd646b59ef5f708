"""What a block showed, in numbers."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.fleet_clients import Whole
from tests.benchmarks.serving.bound import Work, bound_seconds
from tests.benchmarks.serving.contenders import Role
from tests.benchmarks.serving.traffic import Closed, Pace
from tests.benchmarks.spread import quantile
from tests.simgpu.gpu import GpuModel
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
        cpu: seconds by role.
        predicted: cached tokens that routing expected; None where nobody says.
    """

    contender: str
    number: int
    seconds: float
    answers: Sequence[Whole]
    work: Work
    engines: Stats
    cpu: Mapping[Role, float]
    predicted: float | None

    @property
    def valid(self) -> bool:
        """Whether the engines kept to their model of time."""
        return late_share(self.engines) <= LATE_SHARE


@dataclass(frozen=True)
class Setting:
    """What is the same for all blocks of a race."""

    gpu: GpuModel
    engines: int
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
    """Its figures, by the names that the CSV has."""
    count = len(block.answers)
    tokens = sum(answer.tokens for answer in block.answers)
    good = sum(is_good(answer, setting.limits) for answer in block.answers)
    engines = block.engines
    figures: Figures = {
        "requests_per_s": count / block.seconds,
        "tokens_per_s": tokens / block.seconds,
        "goodput_per_s": good / block.seconds,
        **_quantiles("first_token_ms", [answer.first_token_s for answer in block.answers]),
        **_quantiles("between_tokens_ms", [g for each in block.answers for g in gaps_s(each)]),
        "prompt_tokens": block.work.prompt_tokens / count,
        "cached_possible": block.work.cached_tokens / count,
        "cached_predicted": None if block.predicted is None else block.predicted / count,
        "cached_realised": engines.cached_tokens / count,
        "encoder_runs_per_picture": (
            engines.encoder_items / block.work.pictures if block.work.pictures else None
        ),
        "engines_busy": engines.busy_seconds / setting.engines / block.seconds,
        "engines_late": late_share(engines),
        "engines_stalled": engines.stall_seconds / engines.busy_seconds,
        "steps": engines.steps,
    }
    if isinstance(setting.pace, Closed):
        possible = count / bound_seconds(
            block.work, setting.gpu, setting.engines, setting.pace.clients
        )
        figures |= {"bound_per_s": possible, "of_bound": count / block.seconds / possible}
    else:
        figures |= {"bound_per_s": None, "of_bound": None}
    return figures | dict(_cpu(block.cpu, count, tokens))


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

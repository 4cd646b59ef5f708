"""``/mmrouter/history``: how it went in the last minutes, for whoever begins to look only now.

The steps of a quarter of an hour are kept, each the difference of two readings of the metrics.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec
from fastapi import APIRouter
from prometheus_client.metrics_core import Metric

from common.observability.telemetry import (
    DECISIONS,
    INTER_TOKEN_LATENCY,
    PREDICTED_CACHED_TOKENS,
    PROMPT_TOKENS,
    REALISED_CACHED_TOKENS,
    TIME_TO_FIRST_TOKEN,
)
from frontend.processes import Siblings

logger = logging.getLogger(__name__)

STEP_S: Final = 10
"""Seconds of a step. Steps begin at multiples of it, so that those of several processes add up."""

STEPS: Final = 90
"""That are kept."""

_TOPIC: Final = "history"

_NAMED: Final = 8
"""Workers that a line of the log names; more are added up."""


class Queue(NamedTuple):
    """Requests at a worker, as it reported last."""

    running: int
    waiting: int


class Totals(NamedTuple):
    """What was counted.

    Attributes:
        requests: decisions.
        output_tokens: of requests for one answer.
        prompt_tokens, predicted, realised: of prompts; of them, those that should have been, and
            that were, in a worker's cache.
        first_tokens: requests that got one.
        first_token_seconds: that they waited for it, added up.
    """

    requests: float = 0.0
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    predicted: float = 0.0
    realised: float = 0.0
    first_tokens: float = 0.0
    first_token_seconds: float = 0.0


class Step(msgspec.Struct, frozen=True):
    """What was counted within a step; the counts are those of :class:`Totals`.

    Attributes:
        at: when it ended, in seconds since the epoch.
    """

    at: int
    requests: float
    output_tokens: float
    prompt_tokens: float
    predicted: float
    realised: float
    first_tokens: float
    first_token_seconds: float


class History:
    """The last steps of this process, and of all together."""

    def __init__(
        self,
        read: Callable[[], Totals] | None = None,
        clock: Callable[[], float] = time.time,
        queues: Callable[[], Mapping[str, Queue]] = dict,
    ) -> None:
        """
        Args:
            read: what was counted since start; the metrics unless given.
            clock: seconds since the epoch.
            queues: by worker, for the log.
        """
        self._queues = queues
        self._read = read or read_totals
        self._clock = clock
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._before = self._read()
        self._siblings: Siblings | None = None

    def share(self, siblings: Siblings | None) -> None:
        """Tell the other processes, if there are any, and hear of theirs."""
        self._siblings = siblings
        if siblings is not None:
            siblings.tell(_TOPIC, lambda _: msgspec.json.encode(list(self._steps)))

    async def run(self) -> None:
        """Take a step at each multiple of :data:`STEP_S`, until cancelled."""
        while True:
            await asyncio.sleep(STEP_S - self._clock() % STEP_S)
            self.step()

    def step(self) -> None:
        """End the present one, and log it unless nothing happened."""
        totals = self._read()
        # A counter falls when a worker that is gone takes its labels along.
        grown = (max(0.0, now - then) for now, then in zip(totals, self._before, strict=True))
        self._before = totals
        at = round(self._clock() / STEP_S) * STEP_S
        # Steps that a clock which was set back left in the future would hide those that follow.
        while self._steps and self._steps[-1].at > at:
            self._steps.pop()
        self._steps.append(Step(at, *grown))
        if any(msgspec.structs.astuple(self._steps[-1])[1:]):
            logger.info("%s", summary(self._steps[-1], self._queues()))

    async def told(self) -> list[Step]:
        """Of all processes together, oldest first."""
        steps = list(self._steps)
        if self._siblings is not None:
            decoder = msgspec.json.Decoder(list[Step])
            for _, body in await self._siblings.ask(_TOPIC):
                steps += decoder.decode(body)
        sums: dict[int, Totals] = {}
        for one in steps:
            at, *counts = msgspec.structs.astuple(one)
            known = sums.get(at, Totals())
            sums[at] = Totals(*(a + b for a, b in zip(known, counts, strict=True)))
        return [Step(at, *sums[at]) for at in sorted(sums)][-STEPS:]


def summary(step: Step, queues: Mapping[str, Queue]) -> str:
    """Return a step as a line for the log."""
    parts = [
        f"{step.requests:.0f} requests in {STEP_S} s",
        f"{step.prompt_tokens / STEP_S:.0f} prompt tokens/s",
        f"{step.output_tokens / STEP_S:.0f} output tokens/s",
    ]
    if step.prompt_tokens:
        realised, predicted = (
            step.realised / step.prompt_tokens,
            step.predicted / step.prompt_tokens,
        )
        parts.append(f"prefix cache hit rate {realised:.0%} (predicted {predicted:.0%})")
    if step.first_tokens:
        parts.append(f"first token after {step.first_token_seconds / step.first_tokens:.3f} s")
    named = queues
    if len(queues) > _NAMED:
        running, waiting = (sum(counts) for counts in zip(*queues.values(), strict=True))
        named = {f"{len(queues)} workers": Queue(running, waiting)}
    parts += [
        f"{name}: {one.running} running, {one.waiting} waiting" for name, one in named.items()
    ]
    return "; ".join(parts)


def history_routes(history: History) -> APIRouter:
    """The route."""
    api = APIRouter(prefix="/mmrouter", tags=["mmrouter"])

    @api.get("/history")
    async def told() -> list[dict[str, float]]:
        """What was counted in each ten seconds of the last quarter of an hour, oldest first."""
        return [msgspec.to_builtins(one) for one in await history.told()]

    return api


def read_totals() -> Totals:
    """What the metrics of this process say."""
    first_tokens = _sum(TIME_TO_FIRST_TOKEN.collect(), "_count")
    return Totals(
        _sum(DECISIONS.collect(), "_total"),
        first_tokens + _sum(INTER_TOKEN_LATENCY.collect(), "_count"),
        _sum(PROMPT_TOKENS.collect(), "_total"),
        _sum(PREDICTED_CACHED_TOKENS.collect(), "_total"),
        _sum(REALISED_CACHED_TOKENS.collect(), "_total"),
        first_tokens,
        _sum(TIME_TO_FIRST_TOKEN.collect(), "_sum"),
    )


def _sum(metrics: Iterable[Metric], suffix: str) -> float:
    """Over all label sets."""
    return sum(
        sample.value
        for metric in metrics
        for sample in metric.samples
        if sample.name.endswith(suffix)
    )

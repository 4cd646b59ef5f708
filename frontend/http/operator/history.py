"""``/mmrouter/history``: requests, tokens and latencies of the last quarter of an hour, in steps.

A step is the difference of two readings of the metrics. Answers are counted here, by status.
"""

import asyncio
import logging
import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from fastapi import APIRouter
from prometheus_client.metrics_core import Metric

from common.observability.telemetry import (
    DECISIONS,
    FIRST_TOKEN_S,
    INTER_TOKEN_LATENCY,
    PREDICTED_CACHED_TOKENS,
    PROMPT_TOKENS,
    REALISED_CACHED_TOKENS,
    TIME_TO_FIRST_TOKEN,
)
from frontend.asgi import Arrival, Message, Send
from frontend.http.operator.app import is_for_operators
from frontend.processes import Siblings
from frontend.request_context import RequestContext

logger = logging.getLogger(__name__)

STEP_S: Final = 10
"""Seconds of a step. Steps begin at its multiples, so steps of several processes add up."""

STEPS: Final = 90
"""Steps that are kept."""

_TOPIC: Final = "history"

_ERRORS: Final = ("status_429", "status_503", "status_4xx", "status_5xx", "broken")

_NAMED: Final = 8
"""Workers that a log line names; more are summed."""


class Queue(NamedTuple):
    """Requests at a worker, as last reported."""

    running: int
    waiting: int


class Totals(msgspec.Struct, frozen=True):
    """Counts since the start, or of one step.

    Attributes:
        status_4xx, status_5xx: errors, without 429 and 503.
        broken: answers that began with 200 and ended with an error.
        requests: routing decisions.
        output_tokens: of requests for one choice only.
        predicted, realised: prompt tokens predicted, and found, in a worker's cache.
        first_tokens: requests that got a first token.
        first_token_seconds: their waits, summed.
        first_token_within: requests that waited no longer than each of ``FIRST_TOKEN_S``, and all.
    """

    ok: float = 0.0
    status_429: float = 0.0
    status_503: float = 0.0
    status_4xx: float = 0.0
    status_5xx: float = 0.0
    broken: float = 0.0
    requests: float = 0.0
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    predicted: float = 0.0
    realised: float = 0.0
    first_tokens: float = 0.0
    first_token_seconds: float = 0.0
    first_token_within: tuple[float, ...] = (0.0,) * (len(FIRST_TOKEN_S) + 1)

    def combined(self, other: "Totals", combine: Callable[[float, float], float]) -> "Totals":
        mine, others = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        within = map(combine, mine.pop("first_token_within"), others.pop("first_token_within"))
        counts = {name: combine(count, others[name]) for name, count in mine.items()}
        return Totals(**counts, first_token_within=tuple(within))


class Step(NamedTuple):
    """Counts of a step that ended ``at`` seconds since the epoch."""

    at: int
    totals: Totals


class History:
    """The last steps of this process, and of all processes together."""

    def __init__(
        self,
        read: Callable[[], Totals] | None = None,
        clock: Callable[[], float] = time.time,
        queues: Callable[[], Mapping[str, Queue]] = dict,
    ) -> None:
        """Count from now on; ``queues``, by worker, go to the log."""
        self._queues = queues
        self._answers: Counter[str] = Counter()
        self._read = read or (lambda: read_totals(self._answers))
        self._clock = clock
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._before = self._read()
        self._siblings: Siblings | None = None

    def share(self, siblings: Siblings | None) -> None:
        """Exchange steps with the sibling processes, if there are any."""
        self._siblings = siblings
        if siblings is not None:
            siblings.tell(_TOPIC, lambda _: msgspec.json.encode(list(self._steps)))

    async def watch(self, arrival: Arrival) -> None:
        """Count the answer of a work request once the request has ended."""
        if arrival.asks_for_work and not is_for_operators(arrival.path):
            statuses: list[int] = []
            arrival.send = _watching(arrival.send, statuses)
            arrival.held.callback(self._count, arrival.context, statuses)

    def _count(self, context: RequestContext, statuses: Sequence[int]) -> None:
        for status in statuses:
            kind = f"status_{status}" if status in (429, 503) else f"status_{status // 100}xx"
            self._answers[kind if status >= 400 else "broken" if context.failed else "ok"] += 1

    async def run(self) -> None:
        """Take a step at each multiple of :data:`STEP_S`, until cancelled."""
        while True:
            await asyncio.sleep(STEP_S - self._clock() % STEP_S)
            self.step()

    def step(self) -> None:
        """End the current step, and log it unless it is empty."""
        totals = self._read()
        # A counter falls when the labels of a departed worker are removed.
        grown = totals.combined(self._before, lambda now, then: max(0.0, now - then))
        self._before = totals
        at = round(self._clock() / STEP_S) * STEP_S
        # If the clock was set back, steps in the future would hide the following ones.
        while self._steps and self._steps[-1].at > at:
            self._steps.pop()
        self._steps.append(Step(at, grown))
        if grown != Totals(ok=grown.ok):
            logger.info("%s", summary(grown, self._queues()))

    async def told(self) -> list[Step]:
        """Return the steps of all processes together, oldest first."""
        steps = list(self._steps)
        if self._siblings is not None:
            decoder = msgspec.json.Decoder(list[Step])
            for body in (await self._siblings.ask(_TOPIC)).values():
                steps += decoder.decode(body)
        sums: dict[int, Totals] = {}
        for at, totals in steps:
            sums[at] = totals.combined(sums.get(at, Totals()), operator.add)
        return [Step(at, sums[at]) for at in sorted(sums)][-STEPS:]


def _watching(send: Send, statuses: list[int]) -> Send:
    async def watch(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        await send(message)

    return watch


def summary(totals: Totals, queues: Mapping[str, Queue]) -> str:
    """Return the log line of a step."""
    prompts, firsts = totals.prompt_tokens, totals.first_tokens
    parts = [
        f"{totals.requests:.0f} requests in {STEP_S} s",
        f"{prompts / STEP_S:.0f} prompt tokens/s",
        f"{totals.output_tokens / STEP_S:.0f} output tokens/s",
    ]
    if prompts:
        realised, predicted = totals.realised / prompts, totals.predicted / prompts
        parts.append(f"prefix cache hit rate {realised:.0%} (predicted {predicted:.0%})")
    if firsts:
        parts.append(f"first token after {totals.first_token_seconds / firsts:.3f} s")
    errors = {name.removeprefix("status_"): getattr(totals, name) for name in _ERRORS}
    if any(errors.values()):
        said = (f"{name}: {count:.0f}" for name, count in errors.items() if count)
        parts.append(f"errors {', '.join(said)}")
    named = queues
    if len(queues) > _NAMED:
        running, waiting = (sum(counts) for counts in zip(*queues.values(), strict=True))
        named = {f"{len(queues)} workers": Queue(running, waiting)}
    parts += [
        f"{name}: {one.running} running, {one.waiting} waiting" for name, one in named.items()
    ]
    return "; ".join(parts)


def history_routes(history: History) -> APIRouter:
    api = APIRouter(prefix="/mmrouter", tags=["mmrouter"])

    @api.get("/history")
    async def told() -> list[dict[str, float | list[float]]]:
        """Counts of each ten seconds of the last quarter of an hour, oldest first."""
        return [{"at": at} | msgspec.to_builtins(totals) for at, totals in await history.told()]

    return api


def read_totals(answers: Mapping[str, int] = {}) -> Totals:
    """Return the metrics of this process, with its answers by kind."""
    waits = [one for metric in TIME_TO_FIRST_TOKEN.collect() for one in metric.samples]
    first_tokens = sum(one.value for one in waits if one.name.endswith("_count"))
    return Totals(
        **answers,
        requests=_sum(DECISIONS.collect(), "_total"),
        output_tokens=first_tokens + _sum(INTER_TOKEN_LATENCY.collect(), "_count"),
        prompt_tokens=_sum(PROMPT_TOKENS.collect(), "_total"),
        predicted=_sum(PREDICTED_CACHED_TOKENS.collect(), "_total"),
        realised=_sum(REALISED_CACHED_TOKENS.collect(), "_total"),
        first_tokens=first_tokens,
        first_token_seconds=_sum(TIME_TO_FIRST_TOKEN.collect(), "_sum"),
        first_token_within=tuple(one.value for one in waits if one.name.endswith("_bucket")),
    )


def _sum(metrics: Iterable[Metric], suffix: str) -> float:
    """Sum over all label sets."""
    return sum(
        sample.value
        for metric in metrics
        for sample in metric.samples
        if sample.name.endswith(suffix)
    )

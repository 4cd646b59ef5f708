"""A fleet whose engines compute nothing: the real router over steps that last as a model says.

Time is simulated, so a minute of it takes a second or so, and the same seed gives the same minute.
The model is that of ``tests/simgpu/gpu.py``.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.identity import BlockHash, MmHash, WorkerId
from common.request_plane.step_sums import StepSums
from frontend.router import Router, RouterSettings
from frontend.router.decision import Decision
from frontend.router.event_wire import Need, Stored
from frontend.router.hashing.block_hasher import BlockHasher
from frontend.router.inputs import EventSource, RoutingRequest
from tests.fakes.feeds import ScriptedFeeds
from tests.fakes.reports import rank_report
from tests.fakes.routing import BLOCK, NONE_HASH, worker
from tests.simgpu.gpu import GpuModel

HOP_S = 0.003
"""From the decision to the engine."""

REPORT_S = 2.0

STEP_TOKENS = 2048
"""Most tokens that a step prefills."""


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        ended: called with the time when it has its last token.
    """

    request: RoutingRequest
    hashes: list[BlockHash]
    answer_tokens: int
    asked: float
    decision: Decision
    ended: Callable[[float], None]
    computed: int = 0
    answered: int = 0
    cached: int = -1
    first_token: float = 0.0


@dataclass
class Engine:
    """One engine: continuous batching, a prefix cache that forgets nothing, and an encoder cache.

    Attributes:
        encoder_tokens: media tokens that the encoder cache has room for.
    """

    name: WorkerId
    gpu: GpuModel
    slots: int
    encoder_tokens: int
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    blocks: dict[BlockHash, None] = field(default_factory=dict)
    media: dict[MmHash, int] = field(default_factory=dict)
    busy: bool = False
    busy_s: float = 0.0
    steps: StepSums = field(default_factory=partial(StepSums, 0))

    def plan(self) -> tuple[float, list[Job]]:
        """The next step: its seconds, and who gets a token of it."""
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))
        left, prefill, encode, context = STEP_TOKENS, 0, 0, 0
        gets: list[Job] = []
        for job in self.running:
            length = len(job.request.token_ids)
            context += job.computed + job.answered
            if job.computed >= length:
                gets.append(job)
                continue
            if not left:
                continue
            if job.cached < 0:
                job.cached = job.computed = self._cached(job)
            encode += self._encode(job)
            count = min(left, length - job.computed)
            left, prefill = left - count, prefill + count
            job.computed += count
            self.blocks |= dict.fromkeys(job.hashes[: job.computed // BLOCK])
            if job.computed >= length:
                gets.append(job)
        seconds = self.gpu.step_seconds(prefill, encode, context)
        self.busy_s += seconds
        if prefill or encode:
            self.steps = self.steps.plus(prefill + encode, seconds * 1e3)
        return seconds, gets

    def _cached(self, job: Job) -> int:
        usable = job.hashes[: (len(job.request.token_ids) - 1) // BLOCK]
        held = itertools.takewhile(self.blocks.__contains__, usable)
        return BLOCK * sum(1 for _ in held)

    def _encode(self, job: Job) -> int:
        new = [
            need for need in job.request.media
            if need.mm_hash not in self.media and need.span.end > job.computed
        ]  # fmt: skip
        for need in job.request.media:
            if need.span.end > job.computed:
                self.media.pop(need.mm_hash, None)
                self.media[need.mm_hash] = need.num_tokens
        while sum(self.media.values()) > self.encoder_tokens and len(self.media) > 1:
            del self.media[next(iter(self.media))]
        return sum(need.num_tokens for need in new)


class SimFleet:
    """Engines behind a router.

    Args:
        speeds: of each engine.
        encoder_tokens: that each engine's encoder cache has room for; by default, as in vLLM, for
            as many as a step has.
        settings: of the router.

    Attributes:
        done: requests that were answered, in that order.
    """

    def __init__(
        self,
        speeds: Sequence[float],
        *,
        slots: int = 64,
        encoder_tokens: int = STEP_TOKENS,
        **settings: Any,
    ) -> None:
        self.now = 1000.0
        self._feeds = ScriptedFeeds()
        self.router = Router(
            RouterSettings.model_validate(settings),
            clock=lambda: self.now,
            feeds=self._feeds,
            seed=1,
        )
        self.engines = {
            name: Engine(name, GpuModel(speed=speed), slots, encoder_tokens)
            for number, speed in enumerate(speeds)
            for name in (WorkerId(f"w{number}"),)
        }
        self._hasher = BlockHasher(BLOCK, "sha256_cbor", NONE_HASH)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.done: list[Job] = []

    async def start(self) -> None:
        """Let the router know all engines."""
        for name, engine in self.engines.items():
            await self.router.roster.add(
                worker(
                    name,
                    event_sources=(EventSource(0, "unused", "unused"),),
                    max_num_seqs=engine.slots,
                    kv_tokens=10_000_000,
                    encoder_tokens=engine.encoder_tokens,
                )
            )
            self.at(self.now + REPORT_S, partial(self._report, engine))

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have something happen."""
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def run(self, requests: int) -> None:
        """Until so many more are answered."""
        until = len(self.done) + requests
        while len(self.done) < until:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def ask(
        self,
        request: RoutingRequest,
        answer_tokens: int,
        ended: Callable[[float], None] = lambda now: None,
    ) -> Decision:
        """Route a request, now."""
        decision = self.router.route(request)
        infos = request.block_mm_infos(BLOCK) if request.media else ()
        hashes = self._hasher.hash(request.token_ids, infos)
        job = Job(request, hashes, answer_tokens, self.now, decision, ended)
        self.at(self.now + HOP_S, lambda: self._arrive(self.engines[decision.worker_id], job))
        return decision

    def _arrive(self, engine: Engine, job: Job) -> None:
        engine.waiting.append(job)
        if not engine.busy:
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        engine.busy = bool(engine.waiting or engine.running)
        if engine.busy:
            before = len(engine.blocks)
            seconds, gets = engine.plan()
            new = list(itertools.islice(engine.blocks, before, None))
            self.at(self.now + seconds, lambda: self._stepped(engine, gets, new))

    def _stepped(self, engine: Engine, gets: Iterable[Job], new: list[BlockHash]) -> None:
        if new:
            stored = Stored(new, BLOCK, 0, Need.EVERY, 0, "full_attention", False, None, False)
            self._feeds.by_worker[engine.name].apply(stored)
        in_flight = self.router.in_flight
        for job in gets:
            request_id = job.request.request_id
            if not job.answered:
                job.first_token = self.now
                in_flight.first_token(request_id)
                held = [need.mm_hash for need in job.request.media]
                self.router.media.acked(engine.name, held)
            job.answered += 1
            if job.answered == job.answer_tokens:
                engine.running.remove(job)
                in_flight.finished(request_id, served=True)
                waiting = rank_report(waiting=len(engine.waiting))
                self.router.load.reported(engine.name, [waiting])
                self.done.append(job)
                job.ended(self.now)
        self._step(engine)

    def _report(self, engine: Engine) -> None:
        self.router.roster.stepped(engine.name, [engine.steps])
        self.router.load.reported(engine.name, [rank_report(waiting=len(engine.waiting))])
        self.at(self.now + REPORT_S, lambda: self._report(engine))

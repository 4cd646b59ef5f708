"""Blocks of one load through each contender, by turns."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from tests.benchmarks.fleet_clients import ask
from tests.benchmarks.fleet_processes import cached
from tests.benchmarks.fleet_traffic import BestCache
from tests.benchmarks.serving.bound import Work
from tests.benchmarks.serving.contenders import Family
from tests.benchmarks.serving.figures import Block, Limits, Setting
from tests.benchmarks.serving.play import Played, arrivals, play
from tests.benchmarks.serving.stacks import Running
from tests.benchmarks.serving.traffic import Closed, Load, Open, Photos, Session
from tests.benchmarks.serving.usage import used
from tests.simgpu.gpu import GpuModel
from tests.simgpu.totals import late_share, since

WARM_UP = -1
"""The number of the block before the first."""


def rotated(running: Sequence[Running], number: int) -> list[Running]:
    """Contenders in the order of a round: each is as often first as any other."""
    turn = number % len(running)
    return [*running[turn:], *running[:turn]]


@dataclass(frozen=True)
class Course:
    """Where races take place.

    Attributes:
        requests: of a block.
    """

    http: aiohttp.ClientSession
    running: Sequence[Running]
    best: BestCache
    photos: Photos
    gpu: GpuModel
    engines: int
    limits: Limits
    seed: int
    requests: int


@dataclass
class Race:
    """One load."""

    course: Course
    load: Load
    blocks: list[Block] = field(default_factory=list)

    @property
    def setting(self) -> Setting:
        """What is the same for all its blocks."""
        course = self.course
        return Setting(course.gpu, course.engines, self.load.pace, course.limits)

    async def run(self, rounds: int) -> None:
        """So many blocks through each contender, after one that does not count.

        Raises:
            FailedRequestError: a request had no whole answer.
            WrongPromptError: a server made other tokens of a prompt than the others.
        """
        for each in self.course.running:
            await self._block(each, WARM_UP)
        for number in range(rounds):
            for each in rotated(self.course.running, number):
                block = await self._block(each, number)
                self.blocks.append(block)
                _tell(self.load, block)

    async def _block(self, running: Running, number: int) -> Block:
        course, load = self.course, self.load
        name = f"{running.contender.name} {load.name} {number}"
        sessions = load.block(course.seed, number, name, self._requests)
        bodies = [
            [each.body(load.answer_tokens, course.photos.uri) for each in session]
            for session in sessions
        ]
        work = Work.of(sessions, course.best, load.answer_tokens, course.photos.tokens)
        engines = await running.done()
        predicted = await self._predicted(running)
        cpu = running.usage.cpu_seconds()
        played = await self._play(running, sessions, bodies, number)
        cpu = used(cpu, running.usage.cpu_seconds())
        _check(work, played)
        after = await self._predicted(running)
        return Block(
            running.contender.name,
            number,
            played.seconds,
            played.answers,
            work,
            since(engines, await running.done(engines.requests + len(played.answers))),
            cpu,
            None if after is None or predicted is None else after - predicted,
        )

    @property
    def _requests(self) -> int:
        """At least two for each client, or most of a block would be its end."""
        pace = self.load.pace
        least = 2 * pace.clients if isinstance(pace, Closed) else 1
        return max(self.course.requests, least)

    async def _play(
        self,
        running: Running,
        sessions: Sequence[Session],
        bodies: Sequence[Sequence[bytes]],
        number: int,
    ) -> Played:
        pace = self.load.pace
        moments: list[float] = []
        if isinstance(pace, Open):
            moments = arrivals(pace, f"{self.course.seed} {number}", sessions)
        return await play(
            bodies, pace, moments, lambda body: ask(self.course.http, running.url, body)
        )

    async def _predicted(self, running: Running) -> float | None:
        if running.contender.family is not Family.OURS:
            return None
        return (await cached(self.course.http, running.url)).predicted


class WrongPromptError(Exception):
    """Contenders don't serve the same: prompts have other tokens than they should."""


def _check(work: Work, played: Played) -> None:
    tokens = sum(answer.prompt_tokens for answer in played.answers)
    if tokens != work.prompt_tokens:
        raise WrongPromptError(f"prompts had {tokens} tokens, reckoned {work.prompt_tokens}")


def _tell(load: Load, block: Block) -> None:
    """Progress, on standard error."""
    rate = len(block.answers) / block.seconds
    late = late_share(block.engines)
    print(
        f"  {load.name} round {block.number + 1}, {block.contender}: {rate:.2f} requests/s, "
        f"engines late by {late:.1%}" + ("" if block.valid else ": does not count"),
        file=sys.stderr,
        flush=True,
    )

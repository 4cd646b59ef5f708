"""Blocks of one load through each contender, by turns."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import aiohttp

from tests.benchmarks.fleet_clients import Outcome, ask
from tests.benchmarks.fleet_traffic import BestCache
from tests.benchmarks.serving.answers import Texts, blocks, comparable
from tests.benchmarks.serving.bound import Work
from tests.benchmarks.serving.counters import Counters, counters
from tests.benchmarks.serving.engines import Engines
from tests.benchmarks.serving.figures import Block, Limits, Setting
from tests.benchmarks.serving.photos import Photos
from tests.benchmarks.serving.play import Played, arrivals, play
from tests.benchmarks.serving.running import Running
from tests.benchmarks.serving.traffic import Closed, Load, Open, Session
from tests.benchmarks.serving.usage import used
from tests.simgpu.totals import since

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
    engines: Engines
    limits: Limits
    seed: int
    requests: int


async def answers(course: Course) -> dict[str, Texts]:
    """What each contender says to the same questions, one at a time.

    Raises:
        FailedRequestError: a request had no whole answer.
    """
    texts: dict[str, Texts] = {}
    for running in course.running:
        if not comparable(running.contender.family):
            continue
        said: list[str] = []
        for load, sessions in blocks(course.seed):
            played = await play(
                bodies_of(course, load, sessions), load.pace, (), partial(_ask, course, running)
            )
            said += (answer.text for answer in played.answers)
        texts[running.contender.name] = said
    return texts


def bodies_of(course: Course, load: Load, sessions: Sequence[Session]) -> list[list[bytes]]:
    """The requests of sessions, as they go over the wire."""
    return [
        [each.body(load.answer_tokens, course.photos.uri) for each in session]
        for session in sessions
    ]


async def _ask(course: Course, running: Running, body: bytes) -> Outcome:
    return await ask(course.http, running.url, body)


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
        return Setting(course.engines, self.load.pace, course.limits)

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
        bodies = bodies_of(course, load, sessions)
        work = Work.of(sessions, course.best, load.answer_tokens, course.photos.tokens)
        engines = await running.done()
        counted = await self._counted(running)
        cpu = running.usage.cpu_seconds()
        played = await self._play(running, sessions, bodies, number)
        cpu = used(cpu, running.usage.cpu_seconds())
        _check(work, played)
        asked = (engines.requests if engines else 0) + len(played.answers)
        done = await running.done(asked)
        return Block(
            running.contender.name,
            number,
            played.seconds,
            played.answers,
            work,
            since(engines, done) if engines and done else None,
            cpu,
            (await self._counted(running)).since(counted),
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
        return await play(bodies, pace, moments, partial(_ask, self.course, running))

    async def _counted(self, running: Running) -> Counters:
        return await counters(self.course.http, running.contender.family, running.pages)


class WrongPromptError(Exception):
    """Contenders don't serve the same: prompts have other tokens than they should."""


def _check(work: Work, played: Played) -> None:
    tokens = sum(answer.prompt_tokens for answer in played.answers)
    if tokens != work.prompt_tokens:
        raise WrongPromptError(f"prompts had {tokens} tokens, reckoned {work.prompt_tokens}")


def _tell(load: Load, block: Block) -> None:
    """Progress, on standard error."""
    rate = len(block.answers) / block.seconds
    print(
        f"  {load.name} round {block.number + 1}, {block.contender}: {rate:.2f} requests/s, "
        f"engines late by {block.late:.1%}" + ("" if block.valid else ": does not count"),
        file=sys.stderr,
        flush=True,
    )

"""Contenders that are up at the same time, and what they showed."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.fleet_clients import connections
from tests.benchmarks.fleet_processes import Fleet
from tests.benchmarks.fleet_traffic import BestCache
from tests.benchmarks.serving import answers as compared
from tests.benchmarks.serving.contenders import Contender
from tests.benchmarks.serving.engines import Engines
from tests.benchmarks.serving.figures import Limits
from tests.benchmarks.serving.headline import THROUGHPUT
from tests.benchmarks.serving.photos import Photos
from tests.benchmarks.serving.race import Course, Race, answers
from tests.benchmarks.serving.report import memory_table, table
from tests.benchmarks.serving.stacks import Ground
from tests.benchmarks.serving.start import start
from tests.benchmarks.serving.traffic import Closed, Later, Load
from tests.benchmarks.serving.usage import ByRole
from tests.benchmarks.serving.verdict import Verdict, judge
from tests.benchmarks.telling import telling
from tests.simgpu.gpu import GpuModel


@dataclass
class Group:
    """Contenders of which each has its turn in every round.

    Attributes:
        races: so far, one for each load.
        memory: megabytes of each contender, known at the end.
        wrong: how many of their answers differ from those of the first; also known at the end.
    """

    contenders: Sequence[Contender]
    races: list[Race] = field(default_factory=list)
    memory: Mapping[str, ByRole] = field(default_factory=dict)
    wrong: Mapping[str, int] = field(default_factory=dict)

    async def run(self, options: argparse.Namespace, engines: Engines, directory: Path) -> None:
        """Start them, race them over all loads and stop them.

        Args:
            directory: for their logs; there is one.

        Raises:
            FailedRequestError: a request had no whole answer.
            WrongPromptError: a server made other tokens of a prompt than the others.
        """
        with ExitStack() as stack:
            fleet = Fleet(stack, directory, engines.gpu or GpuModel())
            await self._race(options, fleet, engines)

    async def _race(self, options: argparse.Namespace, fleet: Fleet, engines: Engines) -> None:
        names = [each.name for each in self.contenders]
        photos = Photos(options.side)
        async with connections() as http:
            with telling(f"starting {', '.join(names)}"):
                running = await start(Ground(fleet, http, engines), self.contenders)
            print("all serve", file=sys.stderr, flush=True)
            course = Course(
                http,
                running,
                BestCache(fleet.model, photos.tokens),
                photos,
                engines,
                _limits(options, engines),
                options.seed,
                options.requests,
            )
            for each in options.loads:
                load = at_rate(each, self.races) if isinstance(each, Later) else each
                if load is None:
                    continue
                self.races.append(race := Race(course, load))
                await race.run(options.rounds)
                print(table(verdict(race), names) + "\n", flush=True)
            texts = await answers(course)
            self.memory = {each.contender.name: each.usage.memory_mb() for each in running}
            print(memory_table(self.memory))
        self.wrong = compared.differing(texts)
        print(compared.told(self.wrong, len(next(iter(texts.values()), ()))))

    def verdicts(self) -> list[Verdict]:
        """What each of its races showed."""
        return [verdict(each) for each in self.races]


def _limits(options: argparse.Namespace, engines: Engines) -> Limits:
    """What users bear: of slow GPUs more, or none of them would be good enough."""
    speed = engines.speed or 1.0
    return Limits(options.first_limit_ms / speed, options.between_limit_ms / speed)


def at_rate(later: Later, races: Sequence[Race]) -> Load | None:
    """A load whose rate is a share of what the slowest contender had; None if none counts."""
    for race in races:
        if race.load.kind == later.kind and isinstance(race.load.pace, Closed):
            shown = verdict(race)
            names = {block.contender for block in race.blocks}
            rates = [shown.median(name, THROUGHPUT) for name in names]
            if known := [rate for rate in rates if rate is not None]:
                return later.at(min(known))
    print(f"{later.kind} saturated nobody, so its open loop is left out", file=sys.stderr)
    return None


def verdict(race: Race) -> Verdict:
    """What a race showed."""
    return judge(race.load.name, race.blocks, race.setting)

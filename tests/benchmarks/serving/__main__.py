"""``python -m tests.benchmarks.serving``: see the package and docs/benchmarks.md."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.fleet_clients import connections
from tests.benchmarks.fleet_processes import Fleet
from tests.benchmarks.fleet_traffic import BestCache
from tests.benchmarks.serving import answers as compared
from tests.benchmarks.serving.contenders import Contender
from tests.benchmarks.serving.dataset import write_dataset
from tests.benchmarks.serving.engines import Engines
from tests.benchmarks.serving.figures import Limits
from tests.benchmarks.serving.headline import THROUGHPUT, headline
from tests.benchmarks.serving.options import arguments
from tests.benchmarks.serving.photos import Photos
from tests.benchmarks.serving.play import FailedRequestError
from tests.benchmarks.serving.race import Course, Race, WrongPromptError, answers
from tests.benchmarks.serving.report import machine, memory_table, table, write_csv
from tests.benchmarks.serving.stacks import Ground
from tests.benchmarks.serving.start import start
from tests.benchmarks.serving.traffic import Closed, Later, Load
from tests.benchmarks.serving.usage import ByRole
from tests.benchmarks.serving.verdict import Verdict, judge
from tests.benchmarks.telling import telling
from tests.simgpu.gpu import GpuModel


def able(contenders: list[Contender]) -> tuple[list[Contender], Mapping[str, str]]:
    """Contenders that can race here; why the others can't."""
    missing = {
        each.name: why for each in contenders if each.foreign and (why := each.foreign.missing())
    }
    for name, why in missing.items():
        print(f"{name} is skipped: {why}", file=sys.stderr)
    return [each for each in contenders if each.name not in missing], missing


@dataclass(frozen=True)
class Told:
    """What is known after all races.

    Attributes:
        memory: megabytes of each contender.
        wrong: how many of their answers differ.
    """

    memory: Mapping[str, ByRole] = field(default_factory=dict)
    wrong: Mapping[str, int] = field(default_factory=dict)


def limits(options: argparse.Namespace, engines: Engines) -> Limits:
    """What users bear: of slow GPUs more, or none of them would be good enough."""
    speed = engines.speed or 1.0
    return Limits(options.first_limit_ms / speed, options.between_limit_ms / speed)


async def measure(
    options: argparse.Namespace,
    fleet: Fleet,
    engines: Engines,
    contenders: list[Contender],
    races: list[Race],
) -> Told:
    """All races, each put into ``races`` when it begins."""
    photos = Photos(options.side)
    async with connections() as http:
        with telling(f"starting {', '.join(each.name for each in contenders)}"):
            running = await start(Ground(fleet, http, engines), contenders)
        print("all serve", file=sys.stderr, flush=True)
        course = Course(
            http,
            running,
            BestCache(fleet.model, photos.tokens),
            photos,
            engines,
            limits(options, engines),
            options.seed,
            options.requests,
        )
        for each in options.loads:
            known = at_rate(each, races) if isinstance(each, Later) else each
            if known is None:
                continue
            races.append(race := Race(course, known))
            await race.run(options.rounds)
            print(table(verdict(race), [each.name for each in contenders]) + "\n", flush=True)
        texts = await answers(course)
        memory = {each.contender.name: each.usage.memory_mb() for each in running}
        print(memory_table(memory))
    wrong = compared.differing(texts)
    print(compared.told(wrong, len(next(iter(texts.values()), ()))))
    return Told(memory, wrong)


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


def write_first_load(options: argparse.Namespace) -> None:
    """A data set instead of a race."""
    first: Load | Later = options.loads[0]
    assert isinstance(first, Load), "a share comes after what it is one of"
    sessions = first.block(options.seed, 0, "dataset", options.requests)
    with options.dataset.open("w") as file:
        count = write_dataset(file, sessions, Photos(options.side).uri)
    print(f"{count} requests of {first.name}, for answers of {first.answer_tokens} tokens each")


def race(
    options: argparse.Namespace, contenders: list[Contender], missing: Mapping[str, str]
) -> bool:
    """Whether anything was refused, or any answer was another one."""
    versions = {each.name: each.foreign.versions() if each.foreign else {} for each in contenders}
    told_once = {name: value for each in versions.values() for name, value in each.items()}
    host = machine()
    print(", ".join(f"{k} {v}" for k, v in {**host, **told_once}.items()), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as temporary, ExitStack() as stack:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        gpu = None if options.real else GpuModel(speed=options.speed)
        engines = Engines(options.engines, gpu, options.slower)
        fleet = Fleet(stack, directory, engines.gpu or GpuModel())
        races: list[Race] = []
        told = Told()
        try:
            told = asyncio.run(measure(options, fleet, engines, contenders, races))
        except KeyboardInterrupt:
            print("interrupted: what follows is of the rounds until then", file=sys.stderr)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            write_csv(file, races, told.memory, versions)
    verdicts = [verdict(each) for each in races]
    print("\n" + json.dumps(headline(verdicts, missing, told.wrong)))
    return any(each.refused for each in verdicts) or any(told.wrong.values())


def main() -> None:
    options = arguments()
    if options.dataset:
        write_first_load(options)
        return
    contenders, missing = able(options.contenders)
    if not contenders:
        sys.exit("nobody can race here")
    try:
        sys.exit(race(options, contenders, missing))
    except (FailedRequestError, WrongPromptError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

"""``python -m tests.benchmarks.serving``: see the package and tests/benchmarks/README.md."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.serving.contenders import Contender
from tests.benchmarks.serving.dataset import write_dataset
from tests.benchmarks.serving.engines import Engines
from tests.benchmarks.serving.group import Group
from tests.benchmarks.serving.headline import headline
from tests.benchmarks.serving.options import arguments
from tests.benchmarks.serving.photos import Photos
from tests.benchmarks.serving.play import FailedRequestError
from tests.benchmarks.serving.race import WrongPromptError
from tests.benchmarks.serving.report import machine, write_csv
from tests.benchmarks.serving.traffic import Load
from tests.simgpu.gpu import GpuModel


def able(
    groups: Sequence[Sequence[Contender]],
) -> tuple[list[list[Contender]], Mapping[str, str]]:
    """Groups of contenders that can race here; why others can't.

    A group of which only the first is left, which races in another group too, is left out.
    """
    missing = {
        each.name: why
        for group in groups
        for each in group
        if each.foreign and (why := each.foreign.missing())
    }
    for name, why in missing.items():
        print(f"{name} is skipped: {why}", file=sys.stderr)
    left = [[each for each in group if each.name not in missing] for group in groups]
    return [each for number, each in enumerate(left) if len(each) > (number > 0)], missing


def write_first_load(options: argparse.Namespace) -> None:
    """A data set instead of a race."""
    first = options.loads[0]
    assert isinstance(first, Load), "a share comes after what it is one of"
    sessions = first.block(options.seed, 0, "dataset", options.requests)
    with options.dataset.open("w") as file:
        count = write_dataset(file, sessions, Photos(options.side).uri)
    print(f"{count} requests of {first.name}, for answers of {first.answer_tokens} tokens each")


def race(
    options: argparse.Namespace, teams: Sequence[Sequence[Contender]], missing: Mapping[str, str]
) -> bool:
    """Whether anything was refused, or any answer was another one."""
    everyone = [each for team in teams for each in team]
    versions = {each.name: each.foreign.versions() if each.foreign else {} for each in everyone}
    told_once = {name: value for each in versions.values() for name, value in each.items()}
    host = machine()
    print(", ".join(f"{k} {v}" for k, v in {**host, **told_once}.items()), file=sys.stderr)
    gpu = None if options.real else GpuModel(speed=options.speed)
    engines = Engines(options.engines, gpu, options.slower, tuple(options.engine_args))
    groups: list[Group] = []
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as temporary:
        directory = options.keep or Path(temporary)
        try:
            for number, team in enumerate(teams):
                groups.append(group := Group(team))
                logs = directory / f"group-{number}"
                logs.mkdir(parents=True)
                asyncio.run(group.run(options, engines, logs))
        except KeyboardInterrupt:
            print("interrupted: what follows is of the rounds until then", file=sys.stderr)
        finally:
            if options.csv:
                with options.csv.open("w", newline="") as file:
                    write_csv(file, groups, versions)
    verdicts = [each for group in groups for each in group.verdicts()]
    wrong = {name: count for group in groups for name, count in group.wrong.items()}
    print("\n" + json.dumps(headline(verdicts, missing, wrong)))
    return any(each.refused for each in verdicts) or any(wrong.values())


def main() -> None:
    options = arguments()
    if options.dataset:
        write_first_load(options)
        return
    teams, missing = able(options.groups)
    if not teams:
        sys.exit("nobody can race here")
    try:
        sys.exit(race(options, teams, missing))
    except (FailedRequestError, WrongPromptError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

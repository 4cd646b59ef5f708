"""Sends requests that nobody would write to engines of tiny families, and counts who dies.

    python -m tests.families.fuzz [--minutes N] [--seed N] [--trust-request-mm-kwargs] [CASE ...]

For each case a worker and a frontend; a few clients send odd media with odd options, and some hang
up early; at one of them adapters come and go, and one pools. Afterwards each must answer as before.
Requests that were on their way when an engine ended are kept in a file each, as are those that got
a 5xx. Ends with one line of JSON; exit status 1 if an engine or a frontend died, or a family
answers otherwise than before.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from tests.families.fuzz.siege import Siege, Tally
from tests.families.fuzz.targets import TARGETS
from tests.families.stack import make_model

FAMILIES = ("qwen2-5-omni", "idefics3", "gemma3", "embeddings", "adapters")
KEPT = Path(".runs/fuzz-engines")


async def besiege(sieges: list[Siege], until: float, tally: Tally) -> None:
    async with asyncio.TaskGroup() as group:
        for siege in sieges:
            group.create_task(siege.run(until, tally))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="*", metavar="CASE", default=FAMILIES)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--kept", type=Path, default=KEPT, help="where what was found is left")
    parser.add_argument(
        "--trust-request-mm-kwargs",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="of frontends; engines may end with what it lets through, frontends may not",
    )
    options = parser.parse_args()
    trust = f"--{'' if options.trust_request_mm_kwargs else 'no-'}trust-request-mm-kwargs"
    tally = Tally(seed=options.seed)
    print(f"seed {options.seed}", flush=True)
    options.kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mmrouter-fuzz-") as temporary:
        sieges = []
        try:
            for name in options.cases:
                directory = Path(temporary) / name
                directory.mkdir()
                target = TARGETS[name]
                model = make_model(target.case.maker, directory, directory)
                siege = Siege(target, model, directory, options.kept, options.seed, trust)
                sieges.append(siege)
            for siege in sieges:
                siege.wait()
            asyncio.run(besiege(sieges, time.monotonic() + 60 * options.minutes, tally))
        finally:
            for siege in sieges:
                siege.stop()
                for log in siege.directory.glob("*.log"):
                    shutil.copy(log, options.kept)
    print(msgspec.json.encode(tally).decode())
    return int(bool(tally.engines_died or tally.frontends_died or tally.wrong_afterwards))


if __name__ == "__main__":
    sys.exit(main())

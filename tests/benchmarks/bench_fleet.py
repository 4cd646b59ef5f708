"""Several frontends over the same workers, none special: what is lost by not being one.

    python -m tests.benchmarks.bench_fleet

Four real frontends and some workers whose GPU is the clock (``tests/simgpu``) are up all the time.
The same traffic goes through 1, 2 or 4 of the frontends, by turns in blocks of half a minute
whose order rotates. Blocks of a round have the same shape and each its own words and pictures. No
client keeps to a frontend. Then one frontend is killed under load.

Ends with one line of JSON; docs/routing.md says what its fields mean.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.benchmarks import fleet_kill
from tests.benchmarks.fleet_clients import Outcome, Whole, connections, in_turn, send
from tests.benchmarks.fleet_join import join_seconds
from tests.benchmarks.fleet_processes import Cached, Fleet, cached
from tests.benchmarks.fleet_traffic import Ask, BestCache, Traffic
from tests.benchmarks.spread import quantile, spread
from tests.benchmarks.telling import telling
from tests.simgpu.gpu import GpuModel
from tests.simgpu.stats import Stats
from tests.simgpu.totals import LATE_SHARE, late_share, since

ARMS = (1, 2, 4)
MAX_TOKENS = 16

Figures = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Block:
    """What one block showed.

    Attributes:
        hit_ratio: cached prompt tokens, of those that a cache without limits would have had.
        first_s: seconds to the first token of each request.
        engines: what they did meanwhile.
    """

    arm: int
    hit_ratio: float
    first_s: list[float]
    cached: Cached
    engines: Stats

    @property
    def valid(self) -> bool:
        """Whether the engines kept to their model of time."""
        return late_share(self.engines) <= LATE_SHARE

    def first_ms(self, share: float) -> float:
        """A quantile of the time to the first token."""
        return quantile(self.first_s, share) * 1e3


@dataclass
class Race:
    """Blocks through 1, 2 and 4 frontends, by turns."""

    fleet: Fleet
    http: aiohttp.ClientSession
    traffic: Traffic
    best: BestCache
    rounds: list[dict[int, Block]] = field(default_factory=list)

    async def warm_up(self) -> None:
        """Whatever is slow the first time, in each frontend and worker."""
        asks = self.traffic.block("warm", -1)[: 12 * len(self.fleet.workers)]
        await self._send(asks, len(self.fleet.frontends))

    async def run(self, rounds: int) -> None:
        """So many blocks through each arm."""
        for number in range(rounds):
            turn = number % len(ARMS)
            blocks: dict[int, Block] = {}
            for arm in (*ARMS[turn:], *ARMS[:turn]):
                blocks[arm] = await self._block(arm, number)
                print(line(str(number + 1), blocks[arm]), flush=True)
            self.rounds.append(blocks)

    async def _block(self, arm: int, number: int) -> Block:
        asks = self.traffic.block(f"{number} {arm}", number)
        best = await asyncio.to_thread(self.best.best, asks)
        engines = await self.fleet.totals()
        before = await self._cached()
        answers = await self._send(asks, arm)
        for answer, (prompt_tokens, _) in zip(answers, best, strict=True):
            if answer.prompt_tokens != prompt_tokens:
                raise SystemExit(f"{answer.prompt_tokens} tokens, reckoned {prompt_tokens}")
        after = await self._cached()
        done = await self.fleet.totals(engines.requests + len(asks))
        return Block(
            arm,
            sum(answer.cached_tokens for answer in answers) / sum(most for _, most in best),
            [answer.first_token_s for answer in answers],
            Cached(after.predicted - before.predicted, after.realised - before.realised),
            since(engines, done),
        )

    async def _send(self, asks: Sequence[Ask], arm: int) -> list[Whole]:
        bodies = [each.body(MAX_TOKENS) for each in asks]
        outcomes = await send(self.http, asks, bodies, in_turn(self.fleet.urls[:arm]))
        return [whole(outcome) for outcome in outcomes]

    async def _cached(self) -> Cached:
        each = [await cached(self.http, url) for url in self.fleet.urls]
        return Cached(sum(one.predicted for one in each), sum(one.realised for one in each))


def whole(outcome: Outcome) -> Whole:
    """An answer as all must be while nobody is killed."""
    if not isinstance(outcome, Whole):
        raise SystemExit(f"a request failed, so nothing is measured: {outcome}")
    return outcome


HEAD = (
    f"{'round':>6}{'frontends':>10}{'hit ratio':>11}{'first token p50':>16}{'p99 ms':>9}"
    f"{'predicted/realised':>19}{'engines late':>14}{'stalled':>9}{'busy':>7}"
)


def line(name: str, block: Block) -> str:
    """A row of the table."""
    engines = block.engines
    return (
        f"{name:>6}{block.arm:>10}{block.hit_ratio:>11.4f}{block.first_ms(0.5):>16.1f}"
        f"{block.first_ms(0.99):>9.1f}{block.cached.predicted / block.cached.realised:>19.4f}"
        f"{late_share(engines):>14.1%}{engines.stall_seconds / engines.busy_seconds:>9.1%}"
        f"{engines.busy_seconds:>7.1f}" + ("" if block.valid else "  invalid: too late")
    )


def report(rounds: Sequence[dict[int, Block]]) -> Figures:
    """A table of medians over valid blocks, and the figures."""
    figures: Figures = {}
    print(f"\n{'frontends':>9}  hit ratio, first token p50 and p99 in ms: medians over blocks")
    for arm in ARMS:
        valid = [blocks[arm] for blocks in rounds if blocks[arm].valid]
        figures[f"blocks_{arm}"] = len(valid)
        keys = (f"hit_ratio_{arm}", f"ttft_p50_ms_{arm}", f"ttft_p99_ms_{arm}")
        if not valid:
            figures |= dict.fromkeys(keys)
            continue
        columns = (
            [block.hit_ratio for block in valid],
            [block.first_ms(0.5) for block in valid],
            [block.first_ms(0.99) for block in valid],
        )
        print(f"{arm:>9}  " + ", ".join(spread(column) for column in columns))
        figures |= {
            key: round(statistics.median(column), 4)
            for key, column in zip(keys, columns, strict=True)
        }
        predicted = sum(block.cached.predicted for block in valid)
        realised = sum(block.cached.realised for block in valid)
        figures[f"predicted_over_realised_{arm}"] = round(predicted / realised, 4)
    for arm in ARMS[1:]:
        # Blocks of a round have the same shape, so each is compared with its own twin.
        pairs = [(each[1], each[arm]) for each in rounds if each[1].valid and each[arm].valid]
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            ratios = [other.first_ms(share) / one.first_ms(share) for one, other in pairs]
            figures[f"ttft_{name}_{arm}_vs_1"] = (
                round(statistics.median(ratios), 4) if ratios else None
            )
            if ratios:
                print(f"first token {name}, {arm} frontends over 1: {spread(ratios)}")
    everything = [block for blocks in rounds for block in blocks.values()]
    late = [late_share(block.engines) for block in everything]
    figures["engines_late"] = round(statistics.median(late), 4)
    figures["engines_late_max"] = round(max(late), 4)
    figures["blocks_invalid"] = sum(not block.valid for block in everything)
    print(f"engines late, share of their work: {spread(late)}; allowed {LATE_SHARE}")
    return figures


async def measure(options: argparse.Namespace, fleet: Fleet) -> Figures:
    """All of it."""
    gpu = fleet.gpu
    fleet.start(options.workers, max(ARMS))
    traffic = Traffic(options.seed, options.rate, options.seconds)
    figures: Figures = {}
    async with connections() as http:
        with telling("waiting for workers and frontends"):
            for frontend in fleet.frontends:
                await fleet.exact(http, frontend)
        print(
            f"{len(fleet.workers)} simulated workers at {gpu.speed} of an H100's speed, "
            f"{len(fleet.frontends)} frontends, {fleet.memory_gb():.1f} GB; "
            f"{options.rate:g} requests/s"
        )
        race = Race(fleet, http, traffic, BestCache(fleet.model))
        with telling("warming up"):
            await race.warm_up()
        if options.rounds:
            print(HEAD, flush=True)
            await race.run(options.rounds)
            figures |= report(race.rounds)
        if "kill" not in options.without:
            figures |= await fleet_kill.run(http, fleet, traffic)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9, help="blocks through each arm")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in a block")
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--speed", type=float, default=0.25, help="of the GPUs; 1 is an H100's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--without", nargs="*", choices=("kill", "join"), default=(), help="what is left out"
    )
    parser.add_argument("--keep", type=Path, help="directory for the logs, instead of none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as temporary, ExitStack() as stack:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        fleet = Fleet(stack, directory, GpuModel(speed=options.speed))
        figures = asyncio.run(measure(options, fleet))
    if "join" not in options.without:
        figures |= join_seconds()
    print("\n" + json.dumps(figures))
    # Where engines were too late throughout, there is nothing to tell.
    sys.exit(any(figures.get(f"blocks_{arm}") == 0 for arm in ARMS))


if __name__ == "__main__":
    main()

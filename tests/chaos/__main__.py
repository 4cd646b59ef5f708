"""A soak: users ask about pictures while at random everything breaks that can break.

    python -m tests.chaos [--faults N] [--clients N] [--seed N] [--plant]

32 clients stream from two frontends over three workers, all of them real and on this machine.
First undisturbed, which gives the answers to compare with; then while workers are killed,
stopped and restarted in place, a frontend is killed, KV events are lost, shared memory fills
up, the discovery directory is lost or has odd things in it, clocks jump, strangers send hostile
bodies, a process for media hangs and file handles run out. Many requests bear the same id. It has
namespaces of its own for shared memory and processes, so that it can't fill up anybody else's and
whatever stays is seen. Ends with one line of JSON; docs/faults.md says what its fields mean.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp

from tests.benchmarks.telling import telling
from tests.chaos import census
from tests.chaos.clients import ALIKE_SHARE, Answer, Clients, Outcome, Prompt, ask, make_prompts
from tests.chaos.faults import GROUP_KILLED, SHARES, Faults
from tests.chaos.fleet import Fleet
from tests.chaos.holding import held, streaming
from tests.chaos.planted import PLANTED
from tests.chaos.resources import Census
from tests.chaos.travel import Travel
from tests.chaos.watched import PLANT
from tests.e2e.processes import FORKS

INSIDE = "MMROUTER_CHAOS_INSIDE"
"""An environment variable: the directory for everything, once we are in namespaces of our own."""

SHARED_MEMORY_MIB = 3072
PROMPTS = 60
LAST_DEATHS_S = 10.0
"""Until an engine that the last fault killed is surely missed."""

SETTLE_S = 90.0
CALM_LOOKS = 3
CALM_PAUSE_S = 2.0
LOOKS = 3
"""At new pictures, in each round of warming up."""

PLANTING_S = 2.0
LEAVERS = 5


def enter_namespaces() -> None:
    """Become a process that has its own shared memory, process ids, children and directory for
    temporary files."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    mount = f"mount -t tmpfs -o size={SHARED_MEMORY_MIB}m tmpfs /dev/shm"
    command = [*unshare, "sh", "-c", f'{mount} && "$@"; exit $?', "sh"]
    os.environ[INSIDE] = directory = tempfile.mkdtemp(prefix="chaos-")
    os.environ["TMPDIR"] = f"{directory}/tmp"
    Path(os.environ["TMPDIR"]).mkdir()
    os.execvp("unshare", [*command, sys.executable, "-m", "tests.chaos", *sys.argv[1:]])


async def undisturbed(fleet: Fleet, prompts: Sequence[Prompt], at_once: int) -> dict[int, Answer]:
    """The answers to all prompts, asked so many at once."""
    answers: dict[int, Answer] = {}
    limit = asyncio.Semaphore(at_once)

    async def one(prompt: Prompt) -> None:
        async with limit:
            result = await ask(fleet.http, fleet.frontends[prompt.number % 2], prompt)
            if not isinstance(result, Answer):
                raise SystemExit(f"undisturbed, prompt {prompt.number} got {result}")
            answers[prompt.number] = result

    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(one(prompt))
    return answers


async def seconds_to_stop(fleet: Fleet, prompt: Prompt) -> float:
    """From a user's leaving until no engine works. The fleet says so once a second."""
    async with streaming(fleet, prompt):
        pass
    left = time.monotonic()
    while await fleet.works():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return time.monotonic() - left


async def calm(fleet: Fleet) -> Census:
    """A census without what is there now and then, as what has not quite ended."""
    found = await census.take(fleet)
    for _ in range(CALM_LOOKS):
        await asyncio.sleep(CALM_PAUSE_S)
        again = await census.take(fleet)
        found = {name: min(value, again.get(name, 0)) for name, value in found.items()}
    return found


async def settled(fleet: Fleet, before: Census) -> Census:
    """A census, taken again for a while if something has grown: closing takes time."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        after = await census.take(fleet)
        if not census.grown(before, after) or time.monotonic() > deadline:
            return after
        await asyncio.sleep(3)


async def left(at_start: Census) -> list[str]:
    """What stays when everybody has left; processes that just end have a while for it."""
    deadline = time.monotonic() + LAST_DEATHS_S
    while True:
        found = census.left(at_start, [FORKS.pid])
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


class Soak:
    """All of it, in the order of its methods."""

    def __init__(self, options: argparse.Namespace, fleet: Fleet, at_start: Census) -> None:
        random_ = random.Random(options.seed)
        self._options = options
        self._fleet = fleet
        self._prompts = make_prompts(PROMPTS, random_)
        self._expected: dict[int, Answer] = {}
        self._stops: list[float] = []
        self._at_start = at_start
        self.clients = Clients(
            fleet, self._prompts, self._expected, random_, options.pause, options.alike
        )
        self.faults = Faults(fleet, random_)
        self.travel = Travel(fleet, self.clients)
        self.seconds = 0.0
        self.before: Census = {}
        self.after: Census = {}
        self.missed: list[str] = []

    async def prepare(self) -> None:
        """Learn the answers, and fill what fills at first."""
        with telling("starting workers and frontends"):
            await self._fleet.ready()
        with telling("asking undisturbed"):
            self._expected |= await undisturbed(self._fleet, self._prompts, 4)
            await census.warm(self._busy, lambda: census.memory(self._fleet))
        self._stops += [
            await seconds_to_stop(self._fleet, self._prompts[0]) for _ in range(LEAVERS)
        ]
        self.before = await calm(self._fleet)
        print(f"undisturbed: {len(self._expected)} answers; now {self._options.faults} faults")

    async def _busy(self) -> None:
        """All prompts at once, and pictures that nobody has seen for everybody."""
        again = await undisturbed(self._fleet, self._prompts, self._options.clients)
        if unsteady := [n for n, answer in again.items() if answer != self._expected[n]]:
            raise SystemExit(f"undisturbed, the answers to {unsteady} differ: can't compare")
        for _ in range(LOOKS):
            await self.travel.settle()

    async def disturb(self) -> None:
        """Inflict faults while clients ask; then everybody is back, and each answer right."""
        options, fleet = self._options, self._fleet
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(options.clients):
                group.create_task(self.clients.one())
            keeping = [group.create_task(worker.keep()) for worker in fleet.workers]
            progress = group.create_task(report(self.clients, self.faults, started))
            watching = group.create_task(self.travel.watch())
            await self.faults.run(options.faults, options.only)
            self.clients.enough.set()
            await asyncio.sleep(LAST_DEATHS_S)
            await fleet.ready()
            for task in (progress, watching, *keeping):
                task.cancel()
        self.seconds = time.monotonic() - started
        for prompt in self._prompts:
            await self.clients.request(prompt, leaves=False)
        await self.travel.settle()
        engines = sum(worker.starts - 1 for worker in fleet.workers)
        groups = self.faults.inflicted[GROUP_KILLED]
        self.before = census.with_left_by_killed(self.before, engines, groups)
        self._at_start = census.with_left_by_killed(self._at_start, engines, groups)
        self.after = await settled(fleet, self.before)

    async def plant(self) -> None:
        """Leak one of each kind instead, and see that it is counted."""
        async with held(self._fleet, self._prompts[0]):
            for pid in (self._fleet.survivor.process.pid, self._fleet.workers[0].pid):
                os.kill(pid, PLANT)
            await asyncio.sleep(PLANTING_S)
            self.after = await census.take(self._fleet)
        self.missed = sorted(set(PLANTED) - set(census.grown(self.before, self.after)))

    async def figures(self) -> dict[str, float]:
        """Count, ask everybody to leave, count what stays, and print all of it."""
        fleet = self._fleet
        counted: Counter[str] = Counter()
        lost_events = 0
        for frontend in fleet.frontends:
            counted.update(await frontend.metrics())
            lost_events += frontend.losses + (await frontend.report()).lost
        statuses = await asyncio.to_thread(fleet.leave)
        leaks = census.grown(self.before, self.after) + await left(self._at_start)
        if any(statuses):
            leaks.append(f"exit statuses {statuses}")
        tally, faults, travel = self.clients.tally, self.faults, self.travel
        complaints = tally.complaints + faults.complaints
        for (frontend_name, worker_name), times in travel.lasting.items():
            what = f"media from {frontend_name} to {worker_name} keep going another way"
            complaints[what] = times
        print_table(faults.inflicted, self.before, self.after, complaints, leaks, statuses)
        outcomes = {str(outcome): tally.outcomes[outcome] for outcome in Outcome}
        outcomes[str(Outcome.WRONG)] += faults.complaints.total()
        return {
            "faults": faults.inflicted.total(),
            "sent": tally.sent,
            **outcomes,
            "migrated": int(counted["mmrouter_migrations_total"]),
            "retried": int(counted["mmrouter_retries_total"]),
            "resent": tally.resent,
            "alike": tally.alike,
            "leaked": len(leaks),
            "fallbacks": travel.fallbacks,
            "fallbacks_lasting": travel.lasting.total(),
            "events_dropped": lost_events,
            "worker_starts": sum(worker.starts for worker in fleet.workers),
            "engine_stop_s": round(statistics.median(self._stops), 2),
            "seconds": round(self.seconds),
        }


async def soak(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Run all of it and return the figures.

    Raises:
        SystemExit: a planted leak was not counted.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        at_start = census.files_left()
        fleet = Fleet(options.model, directory, http)
        try:
            run = Soak(options, fleet, at_start)
            await run.prepare()
            await (run.plant() if options.plant else run.disturb())
            figures = await run.figures()
        finally:
            await asyncio.to_thread(fleet.end)
    if run.missed:
        raise SystemExit(f"leaked, but not counted: {run.missed}")
    return figures


async def report(clients: Clients, faults: Faults, started: float) -> None:
    """A line every half minute."""
    while True:
        await asyncio.sleep(30)
        tally = {str(outcome): n for outcome, n in clients.tally.outcomes.items()}
        print(f"{time.monotonic() - started:5.0f} s: {faults.inflicted.total()} faults, {tally}")
        sys.stdout.flush()


def print_table(
    inflicted: Counter[str],
    before: Census,
    after: Census,
    complaints: Counter[str],
    leaks: Sequence[str],
    statuses: Sequence[int],
) -> None:
    print(f"\n{'fault':<40}{'times':>10}")
    for kind in SHARES:
        print(f"{kind:<40}{inflicted[kind]:>10}")
    print(f"\n{'what there is':<60}{'before':>10}{'after':>10}")
    for name in sorted(before | after):
        print(f"{name:<60}{before.get(name, 0):>10.0f}{after.get(name, 0):>10.0f}")
    if complaints:
        print("\nnot as it should be:")
        for complaint, times in complaints.most_common():
            print(f"{times:>6} {complaint}")
    if leaks:
        print("\nleaked:", *leaks, sep="\n  ")
    print(f"\nexit statuses {statuses}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument(
        "--only", nargs="+", choices=SHARES, default=tuple(SHARES), metavar="KIND", help="of faults"
    )
    parser.add_argument(
        "--alike", type=float, default=ALIKE_SHARE, help="share of requests under the same id"
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=15.0, help="mean seconds between a client's")
    parser.add_argument("--keep", type=Path, help="directory for the logs, instead of none")
    parser.add_argument(
        "--plant", action="store_true", help="leak on purpose instead of faults, and find it"
    )
    options = parser.parse_args()
    if INSIDE not in os.environ:
        enter_namespaces()
    own = Path(os.environ[INSIDE])
    try:
        directory = options.keep or own / "logs"
        directory.mkdir(parents=True, exist_ok=True)
        options.model = directory / "model"
        script = Path(__file__).parents[2] / "examples" / "demo_model.py"
        subprocess.run([sys.executable, script, options.model], check=True)
        with suppress(KeyboardInterrupt):
            figures = asyncio.run(soak(options, directory))
            print(json.dumps(figures))
    finally:
        shutil.rmtree(own, ignore_errors=True)


if __name__ == "__main__":
    main()

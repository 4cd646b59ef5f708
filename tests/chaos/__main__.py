"""A soak: users ask about pictures while at random everything breaks that can break.

    python -m tests.chaos [--faults N] [--clients N] [--seed N]

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
from tests.chaos.faults import SHARES, Faults
from tests.chaos.fleet import Fleet
from tests.chaos.travel import Travel

INSIDE = "MMROUTER_CHAOS_INSIDE"
SHARED_MEMORY_MIB = 3072
PROMPTS = 60
LAST_DEATHS_S = 10.0
"""Until an engine that the last fault killed is surely missed."""

SETTLE_S = 90.0
LEAVERS = 5


def enter_namespaces() -> None:
    """Become a process that has its own shared memory, process ids and children."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    mount = f"mount -t tmpfs -o size={SHARED_MEMORY_MIB}m tmpfs /dev/shm"
    command = [*unshare, "sh", "-c", f'{mount} && "$@"; exit $?', "sh"]
    os.environ[INSIDE] = "1"
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
    endless = Prompt(prompt.number, prompt.body | {"max_tokens": 3000, "stream": True})
    await ask(fleet.http, fleet.survivor, endless, leave_after=30)
    left = time.monotonic()
    while True:
        if not any(view["running"] for view in await fleet.views(fleet.survivor)):
            return time.monotonic() - left
        await asyncio.sleep(0.02)


async def settled(fleet: Fleet, before: census.Census) -> census.Census:
    """A census, taken again for a while if something has grown: closing takes time."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        after = await census.take(fleet)
        if not census.grown(before, after) or time.monotonic() > deadline:
            return after
        await asyncio.sleep(3)


async def soak(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """All of it; the figures."""
    random_ = random.Random(options.seed)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        fleet = Fleet(options.model, directory, http)
        try:
            with telling("starting workers and frontends"):
                await fleet.ready()
            prompts = make_prompts(PROMPTS, random_)
            with telling("asking undisturbed"):
                expected = await undisturbed(fleet, prompts, 4)
                again = await undisturbed(fleet, prompts, options.clients)
            if unsteady := [number for number in expected if expected[number] != again[number]]:
                raise SystemExit(f"undisturbed, the answers to {unsteady} differ: can't compare")
            stops = [await seconds_to_stop(fleet, prompts[0]) for _ in range(LEAVERS)]
            before = await census.take(fleet)
            print(f"undisturbed: {len(expected)} answers, twice; now {options.faults} faults")

            started = time.monotonic()
            clients = Clients(fleet, prompts, expected, random_, options.pause, options.alike)
            faults = Faults(fleet, random_)
            travel = Travel(fleet, clients)
            async with asyncio.TaskGroup() as group:
                for _ in range(options.clients):
                    group.create_task(clients.one())
                keeping = [group.create_task(worker.keep()) for worker in fleet.workers]
                progress = group.create_task(report(clients, faults, started))
                watching = group.create_task(travel.watch())
                await faults.run(options.faults, options.only)
                clients.enough.set()
                await asyncio.sleep(LAST_DEATHS_S)
                await fleet.ready()
                for task in (progress, watching, *keeping):
                    task.cancel()
            seconds = time.monotonic() - started
            # Everybody is back: now each answer must be there and right.
            for prompt in prompts:
                await clients.request(prompt, leaves=False)
            await travel.settle()
            after = await settled(fleet, before)
            counted: Counter[str] = Counter()
            lost_events = 0
            for frontend in fleet.frontends:
                counted.update(await frontend.metrics())
                lost_events += frontend.losses + (await frontend.report()).lost
        finally:
            statuses = await asyncio.to_thread(fleet.stop)
    left = [*census.processes_left(), *(arena.name for arena in census.arenas())]
    leaks = [*census.grown(before, after), *left]
    if any(statuses):
        leaks.append(f"exit statuses {statuses}")

    tally = clients.tally
    complaints = tally.complaints + faults.complaints
    for (frontend_name, worker_name), times in travel.lasting.items():
        complaints[f"media from {frontend_name} to {worker_name} keep going another way"] = times
    print_table(faults.inflicted, before, after, complaints, leaks, statuses)
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
        "engine_stop_s": round(statistics.median(stops), 2),
        "seconds": round(seconds),
    }


async def report(clients: Clients, faults: Faults, started: float) -> None:
    """A line every half minute."""
    while True:
        await asyncio.sleep(30)
        tally = {str(outcome): n for outcome, n in clients.tally.outcomes.items()}
        print(f"{time.monotonic() - started:5.0f} s: {faults.inflicted.total()} faults, {tally}")
        sys.stdout.flush()


def print_table(
    inflicted: Counter[str],
    before: census.Census,
    after: census.Census,
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
    options = parser.parse_args()
    if INSIDE not in os.environ:
        enter_namespaces()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        options.model = directory / "model"
        script = Path(__file__).parents[2] / "examples" / "demo_model.py"
        subprocess.run([sys.executable, script, options.model], check=True)
        with suppress(KeyboardInterrupt):
            figures = asyncio.run(soak(options, directory))
            print(json.dumps(figures))


if __name__ == "__main__":
    main()

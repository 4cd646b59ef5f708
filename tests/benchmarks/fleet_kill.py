"""The kill of ``bench_fleet``: ``kill -9`` of a frontend under load, and what anybody notices.

Clients of the killed one see their connections break, and ask another one, as behind a load
balancer. Every whole answer is compared with the one that the same prompt gets afterwards: what a
simulated engine answers is a function of the prompt.
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from tests.benchmarks.fleet_clients import Cut, Odd, Outcome, Whole, ask, in_turn
from tests.benchmarks.fleet_processes import Fleet, cached
from tests.benchmarks.fleet_traffic import Ask, Traffic
from tests.e2e.processes import HttpServer, shared_memory_of
from tests.simgpu.totals import late_share, since
from tests.waiting import until

MAX_TOKENS = 48
"""Longer answers than in the race, so that many are under way at any moment."""

OPEN_STREAMS = 3
"""Streams of the doomed frontend that must be under way when it is killed."""

AFTER_SHARE = 0.3
"""Of the block's time, before which nobody is killed."""

AT_ONCE = 4
LET_GO_S = 60.0


@dataclass
class Tally:
    """What came of all requests.

    Attributes:
        answers: the whole ones, with who gave them.
        cut: streams that broke with the killed frontend, after and before their beginning.
        complaints: what nobody should have seen.
        lost_by_others: requests of other frontends without an answer, or with a wrong one.
        odd_at_killed: clients of the killed one who saw anything but a broken connection.
    """

    answers: list[tuple[Ask, Whole, bool]] = field(default_factory=list)
    cut: Counter[bool] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    lost_by_others: int = 0
    odd_at_killed: int = 0

    def blame(self, *, at_killed: bool, complaint: str) -> None:
        """Something that nobody should have seen."""
        self.complaints.append(complaint)
        if at_killed:
            self.odd_at_killed += 1
        else:
            self.lost_by_others += 1


class Kill:
    """One frontend of a fleet is killed and started again."""

    def __init__(self, http: aiohttp.ClientSession, fleet: Fleet, asks: Sequence[Ask]) -> None:
        self.tally = Tally()
        self._http = http
        self._fleet = fleet
        self._asks = asks
        self._doomed = fleet.frontends[1]
        self._open = 0
        self._dead = asyncio.Event()

    async def load(self) -> None:
        """All requests, each at its moment."""
        clock = asyncio.get_running_loop().time
        start = clock()
        url = in_turn(self._fleet.urls)

        async def one(each: Ask) -> None:
            await asyncio.sleep(start + each.at - clock())
            await self._request(each, url(each))

        await asyncio.gather(*map(one, self._asks))

    async def _request(self, each: Ask, url: str) -> None:
        doomed = url == self._doomed.url
        self._open += doomed
        outcome = await ask(self._http, url, each.body(MAX_TOKENS))
        self._open -= doomed
        if doomed and isinstance(outcome, Cut) and self._dead.is_set():
            self.tally.cut[outcome.begun] += 1
            url = self._fleet.urls[0]
            doomed = False
            outcome = await ask(self._http, url, each.body(MAX_TOKENS))
        self._note(each, outcome, at_killed=doomed)

    def _note(self, each: Ask, outcome: Outcome, *, at_killed: bool) -> None:
        match outcome:
            case Whole():
                self.tally.answers.append((each, outcome, at_killed))
            case Cut(_, why) | Odd(why):
                self.tally.blame(at_killed=at_killed, complaint=why)

    async def strike(self) -> tuple[int, HttpServer]:
        """Kill the doomed one amid its streams and start another in its place.

        Returns:
            The killed one's process id, and the heir.
        """
        await asyncio.sleep(self._asks[-1].at * AFTER_SHARE)
        await until(lambda: self._open >= OPEN_STREAMS)
        self._dead.set()
        self._doomed.signal(signal.SIGKILL)
        await asyncio.to_thread(self._doomed.wait)
        port = int(self._doomed.url.rpartition(":")[2])
        return self._doomed.pid, self._fleet.start_frontend("heir", port)

    async def judge(self, heir: HttpServer) -> None:
        """Ask everything again, undisturbed, of the heir; compare."""
        limit = asyncio.Semaphore(AT_ONCE)
        right: dict[Ask, str] = {}

        async def one(each: Ask) -> None:
            async with limit:
                outcome = await ask(self._http, heir.url, each.body(MAX_TOKENS))
            if isinstance(outcome, Whole):
                right[each] = outcome.text
            else:
                self.tally.blame(at_killed=False, complaint=f"the heir: {outcome}")

        await asyncio.gather(*map(one, self._asks))
        for each, answer, at_killed in self.tally.answers:
            if each in right and (answer.text, answer.tokens) != (right[each], MAX_TOKENS):
                self.tally.blame(
                    at_killed=at_killed, complaint=f"wrong: {answer}, not {right[each]}"
                )


def maps(process: psutil.Process, owner: int) -> bool:
    """Whether a process has the shared memory of another mapped, be it gone from the directory."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return f"mmrouter-arena-{owner}-" in Path(f"/proc/{process.pid}/maps").read_text()
    return False


async def seconds_until_let_go(fleet: Fleet, owner: int) -> float | None:
    """Until no worker has the memory of a dead frontend mapped; None if that doesn't come."""
    began = time.monotonic()
    while time.monotonic() - began < LET_GO_S:
        workers = [
            each for worker in fleet.workers for each in psutil.Process(worker.pid).children(True)
        ]
        if not any(maps(each, owner) for each in workers):
            return time.monotonic() - began
        await asyncio.sleep(0.2)
    return None


async def run(
    http: aiohttp.ClientSession, fleet: Fleet, traffic: Traffic
) -> dict[str, float | int | str | None]:
    """All of it; the figures."""
    asks = traffic.block("kill", -2)
    before = await fleet.totals()
    kill = Kill(http, fleet, asks)
    loading = asyncio.create_task(kill.load())
    owner, heir = await kill.strike()
    let_go = await seconds_until_let_go(fleet, owner)
    exact = await fleet.exact(http, heir)
    left = shared_memory_of(owner)
    await loading
    engines = since(before, await fleet.totals())

    known = await cached(http, heir.url)
    await kill.judge(heir)
    now = await cached(http, heir.url)
    predicted, realised = now.predicted - known.predicted, now.realised - known.realised

    tally = kill.tally
    print(
        f"\nkill -9 of one of {len(fleet.frontends)} frontends: {len(asks)} requests, "
        f"{len(tally.answers)} whole answers, {tally.cut[True]} streams of its clients broken, "
        f"{tally.cut[False]} of their connections refused or broken before the answer;\n"
        f"lost or wrong for others {tally.lost_by_others}, odd for its clients "
        f"{tally.odd_at_killed}; workers let go of its memory after {let_go} s, "
        f"its arena is {'left: ' + ' '.join(left) if left else 'gone'};\n"
        f"the heir knew all caches after {exact:.1f} s, and then expected {predicted:.0f} "
        f"cached tokens and got {realised:.0f}; engines late {late_share(engines):.1%}"
    )
    for complaint in tally.complaints[:20]:
        print("  not as it should be:", complaint)
    return {
        "lost_by_others": tally.lost_by_others,
        "odd_at_killed": tally.odd_at_killed,
        "cut_streams": tally.cut[True],
        "cut_connections": tally.cut[False],
        "let_go_s": None if let_go is None else round(let_go, 2),
        "arenas_left": len(left),
        "heir_exact_s": round(exact, 2),
        "heir_predicted_over_realised": round(predicted / realised, 4) if realised else None,
    }

"""Sends hostile requests to a frontend over simulated engines, and watches what each does.

    python -m tests.fuzz_http [--seconds N] [--seed N] [--kinds NAME ...] [--first N] [--requests N]

One request at a time, each of at most 1 MB, while a user asks what anybody asks. For each finding a
line says the smallest request that does the same, which is kept in a file. Ends with one line of
JSON; exit status 1 if any figure is not as it must be. The same seed draws the same requests:
``--first 4711 --requests 1`` sends that one alone.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tests.demo_model import make_demo_model
from tests.fuzz_http.campaign import GROWTH_MB, STALL_S, Campaign, Figures
from tests.fuzz_http.canaries import Canaries
from tests.fuzz_http.fleet import KINDS, Fleet
from tests.fuzz_http.others import Others
from tests.fuzz_http.requests import Drawing

KEPT = Path(".runs/fuzz-http")
KEPT_MB = 64.0
"""What may stay in memory after requests that were sent before, which is noise of the allocator's.
The first time they fill caches, and a feature is imported when it is first used."""

PROGRESS_S = 20.0
SETTLE_S = 60.0


def numbers(options: argparse.Namespace) -> list[Iterator[int]]:
    """Return the numbers of requests to draw: new ones for three quarters of the time, which runs
    from now, and then the first of them again.
    """
    began, seconds = time.monotonic(), options.seconds / len(options.kinds)

    def part(until: float, count: int | None) -> Iterator[int]:
        for number in itertools.islice(itertools.count(options.first), count):
            if time.monotonic() > until:
                return
            yield number

    few = options.requests
    again = None if few is None else few // 4
    return [part(began + 0.75 * seconds, few), part(began + seconds, again)]


def besiege(campaign: Campaign, drawn: Iterable[int], drawing: Drawing, kept: Path) -> int:
    """Send what is drawn, until something ends. Returns how many were found."""
    figures, found, told = campaign.figures, 0, time.monotonic()
    for number in drawn:
        request = drawing.request(number)
        outcome = campaign.take(request)
        if outcome.wrong:
            found += 1
            smallest, does = campaign.shrink(request, outcome)
            print(f"{number}: {outcome.wrong}: {smallest.shape}: {does.figures}", flush=True)
            print(f"    {does.said[:300]!r}", flush=True)
            (kept / f"{outcome.wrong}-{number}.json").write_bytes(smallest.body)
            if outcome.dead:
                break
        if time.monotonic() > told + PROGRESS_S:
            told = time.monotonic()
            print(f"{figures.requests} requests, {figures.statuses}, {found} found", flush=True)
    return found


def settled_mb(fleet: Fleet) -> float:
    """Memory of the frontend once it does not get less any more."""
    least, since = fleet.memory_mb(), time.monotonic()
    until = since + SETTLE_S
    while time.monotonic() < min(since + 5, until):
        time.sleep(0.5)
        if (now := fleet.memory_mb()) < least - 1:
            least, since = now, time.monotonic()
    return least


def attack(
    name: str, model: Path, directory: Path, options: argparse.Namespace, figures: Figures
) -> int:
    """Attack one kind of fleet, which is started again if it ends."""
    found, canaries = 0, Canaries(directory)
    parts: list[Iterator[int]] | None = None
    for again in itertools.count():
        fleet = Fleet(KINDS[name], model, directory / str(again), canaries)
        try:
            fleet.wait()
            campaign = Campaign(fleet, canaries, figures)
            drawing = Drawing(fleet.api(), options.seed)
            others = Others(fleet.frontend.url)
            canaries.touched()
            others.start()
            parts = numbers(options) if parts is None else parts
            memory = [settled_mb(fleet)]
            while parts and not fleet.dead():
                found += besiege(campaign, parts[0], drawing, options.kept)
                if not fleet.dead():
                    parts.pop(0)
                    memory.append(settled_mb(fleet))
            others.stop()
            tell_of(others, figures)
            if not fleet.dead():
                print(f"{name}: MiB in memory: {', '.join(f'{each:.0f}' for each in memory)}")
                figures.rss_kept_mb = round(max(figures.rss_kept_mb, memory[-1] - memory[-2]), 1)
                return found
        finally:
            fleet.stop()
    raise AssertionError


def tell_of(others: Others, figures: Figures) -> None:
    """Add what a user noticed to the figures."""
    figures.others_asked += others.asked
    figures.others_failed += len(others.failed)
    figures.others_slowest_s = round(max(figures.others_slowest_s, others.slowest_s), 2)
    for said in others.failed[:3]:
        print(f"others: {said}", flush=True)


def all_is_well(figures: Figures) -> bool:
    return not (
        figures.died
        or figures.http_500
        or figures.others_failed
        or figures.sockets_unexpected
        or figures.files_unexpected
        or figures.loop_stall_s_max > STALL_S
        or figures.rss_growth_mb_max > GROWTH_MB
        or figures.rss_kept_mb > KEPT_MB
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_http", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--requests", type=int, help="how many; by default as the time allows")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where what was found is left")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    options.kept.mkdir(parents=True, exist_ok=True)
    figures = Figures(seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="mmrouter-fuzz-") as temporary:
        model = make_demo_model(Path(temporary) / "model")
        for name in options.kinds:
            print(f"fleet: {name}", flush=True)
            attack(name, model, Path(temporary) / name, options, figures)
    print(msgspec.json.encode(figures).decode())
    return int(not all_is_well(figures))


if __name__ == "__main__":
    sys.exit(main())

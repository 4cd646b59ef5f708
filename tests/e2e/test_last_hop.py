"""The last hop, from a worker to its engine, in all of vLLM's ways, with injected items.

Also the way back: media that a worker evicted are asked for again.
"""

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.e2e.conftest import Endpoint, LetGo, Stack, wait_for_workers
from tests.e2e.hops import HOPS
from tests.e2e.lab import Asked, Lab, words
from tests.e2e.processes import start_frontend, start_worker, worker_pid

ELSEWHERE = (
    *("unshare", "--mount", "--ipc", "sh", "-c"),
    "mount -t tmpfs none /dev/shm && echo ready && exec cat",
)
"""Holds a place with shared memory of its own, as in a container, until its input ends."""

WHAT = words("What is this?")


class Hop(NamedTuple):
    """One way to the engine, with the directory that has the worker's card."""

    name: str
    lab: Lab
    cards: Path


@pytest.fixture(scope="module", params=HOPS)
def hop(
    request: pytest.FixtureRequest,
    stack: Stack,
    plain: Endpoint,
    pictures_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    let_go: LetGo,
) -> Iterator[Hop]:
    """A frontend over one worker; one hop after the other, for the sake of memory."""
    name: str = request.param
    flags, env = HOPS[name]
    cards = tmp_path_factory.mktemp(name)
    worker = start_worker(name, stack.model, cards, stack.logs, *flags, env=env)
    frontend = start_frontend(f"frontend-{name}", cards, stack.logs)
    try:
        wait_for_workers(frontend, [worker])
        endpoint = Endpoint(frontend.url)
        yield Hop(name, Lab("shm", endpoint, plain, pictures_url), cards)
        endpoint.close()
    finally:
        let_go(frontend, worker)


def test_images_reach_the_model(hop: Hop) -> None:
    """``ask`` compares with plain vLLM and checks that the worker processes nothing."""
    name, lab, _ = hop
    one, two = lab.drawn(f"{name}-1"), lab.drawn(f"{name}-2")
    lab.ask(one, WHAT)
    lab.ask(one, words("And once more?"))
    lab.ask(one, two, one, words("Compare."))
    again = lab.ask(one, WHAT)
    assert again.cached > 0


def test_no_process_of_the_engine_maps_the_arena(hop: Hop) -> None:
    """So registering the arena with CUDA would speed nothing up: docs/transfer.md."""
    name, lab, cards = hop
    lab.ask(lab.drawn(f"{name}-mapped"), WHAT)
    worker = psutil.Process(worker_pid(cards, name))
    engine = worker.children(recursive=True)
    assert maps_an_arena(worker)
    assert any("EngineCore" in " ".join(each.cmdline()) for each in engine)
    assert [each for each in engine if maps_an_arena(each)] == []


def test_a_worker_keeps_what_its_cache_keeps(hop: Hop) -> None:
    name, lab, _ = hop
    lab.ask(lab.drawn(f"{name}-kept"), WHAT)
    again = lab.ask(lab.drawn(f"{name}-kept"), words("And now?"))
    keeps = not name.startswith("no-cache")
    assert (again.shipped == []) == keeps


def test_what_a_worker_evicted_is_sent_again(hop: Hop) -> None:
    name, lab, _ = hop
    asked = [lab.ask(lab.drawn(f"{name}-evicted-{n}"), WHAT) for n in range(8)]
    assert all(how(one) == ["shipped"] for one in asked)
    again = lab.ask(lab.drawn(f"{name}-evicted-0"), words("Still there?"))
    if name == "cache-lru-small":
        # It holds two or three of them; the frontend believes that it holds all.
        assert how(again) == ["held", "not_held"], "named by a nack, and supplied"
        assert again.bytes_sent > 0


@pytest.fixture
def elsewhere() -> Iterator[Sequence[str]]:
    """What to put before a command to run it there."""
    pipe = subprocess.PIPE
    holder = subprocess.Popen(ELSEWHERE, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        pytest.skip(f"namespaces can't be made here: {holder.communicate()[1].strip()}")
    yield "nsenter", f"--target={holder.pid}", "--mount", "--ipc", f"--wdns={Path.cwd()}"
    holder.communicate()  # the worker keeps what it is in


def test_a_worker_that_sees_other_shared_memory_is_reached_by_nixl(
    stack: Stack,
    plain: Endpoint,
    pictures_url: str,
    elsewhere: Sequence[str],
    tmp_path: Path,
    let_go: LetGo,
) -> None:
    """Same host, same host name: only the probe can tell."""
    tcp = "--nixl-allow-tcp"  # UCX's shared memory doesn't reach into other namespaces
    worker = start_worker("elsewhere", stack.model, tmp_path, stack.logs, tcp, within=elsewhere)
    frontend = start_frontend("frontend-elsewhere", tmp_path, stack.logs, tcp)
    try:
        wait_for_workers(frontend, [worker])
        endpoint = Endpoint(frontend.url)
        # Inline until both sides have started NIXL, which nobody needed before.
        deadline = time.monotonic() + 60
        while endpoint.workers()["elsewhere"]["transport"] != "nixl":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        lab = Lab("nixl", endpoint, plain, pictures_url)
        one, two = lab.drawn("elsewhere-1"), lab.drawn("elsewhere-2")
        assert len(lab.ask(one, two, WHAT).shipped) == 2
        assert lab.ask(one, two, WHAT).shipped == []
        endpoint.close()
    finally:
        let_go(frontend, worker)


def maps_an_arena(process: psutil.Process) -> bool:
    return "/dev/shm/mmrouter-arena-" in Path(f"/proc/{process.pid}/maps").read_text()


def how(asked: Asked) -> list[str]:
    return [move["how"] for move in asked.media]

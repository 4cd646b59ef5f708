"""One frontend of two processes, over a worker whose engine costs nothing: what one of them knows
both do, and what one of them suffers the other does not."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.fork_server import SPARE
from tests.e2e.lab import image, words
from tests.e2e.processes import HttpServer, Process, shared_memory_of, start_frontend
from tests.pictures import data_uri, picture
from tests.waiting import until

LIMIT_S = 120


@dataclass(frozen=True)
class Pair:
    worker: Process
    frontend: HttpServer

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.frontend.url + path, timeout=LIMIT_S)

    def samples(self, name: str, **labels: str) -> dict[str, float]:
        """Of one metric, by process."""
        found: dict[str, float] = {}
        seen = set()
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in seen
                seen.add(key)
                if sample.name == name and labels.items() <= sample.labels.items():
                    found[sample.labels["process"]] = sample.value
        return found

    def pids(self) -> dict[str, int]:
        """Of the processes that serve."""
        serving: dict[str, int] = {}
        for child in psutil.Process(self.frontend.pid).children():
            if child.cmdline()[0] != SPARE:
                serving[str(len(serving))] = child.pid
        return serving

    async def both_serve(self) -> None:
        def ready() -> bool:
            views = self.get("/mmrouter/workers").json()
            return bool(views and views[0]["connected"] and len(views[0]["processes"]) == 2)

        await until(lambda: self.samples("mmrouter_processes").get("parent") == 2.0)
        await until(ready)


def body(picture_url: str | None, text: str = "describe", **more: Any) -> dict[str, Any]:
    content = [words(text)]
    if picture_url is not None:
        content.insert(0, image(picture_url) | more)
    return {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("processes")
    cards = directory / "cards"
    worker = Process(
        "instant",
        [
            sys.executable, "-m", "tests.benchmarks.instant_worker",
            str(model), str(cards), "4096", "4",
        ],
        directory / "worker.log",
    )  # fmt: skip
    frontend = start_frontend("pair", cards, directory, "--processes=2", "--max-inflight=64")
    try:
        frontend.wait_for_status(200)
        yield Pair(worker, frontend)
    finally:
        frontend.stop()
        worker.stop()


async def ask_all(pair: Pair, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """At the same time, each over a connection of its own, so that both processes have some."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as client:
        asked = (client.post(f"{pair.frontend.url}/v1/chat/completions", json=b) for b in bodies)
        return await asyncio.gather(*asked)


async def until_both_have(pair: Pair, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """Ask until both processes have answered since; all answers."""
    before = pair.samples("mmrouter_requests_total", outcome="ok")
    answers: list[httpx.Response] = []

    def both() -> bool:
        now = pair.samples("mmrouter_requests_total", outcome="ok")
        return all(now.get(name, 0.0) > before.get(name, 0.0) for name in "01")

    async with asyncio.timeout(LIMIT_S):
        while not both():
            answers += await ask_all(pair, *bodies)
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    return answers


@pytest.mark.timeout(600)
async def test_a_picture_that_one_has_processed_the_other_knows(pair: Pair) -> None:
    await pair.both_serve()
    before = pair.samples("mmrouter_hf_processor_runs", side="frontend")
    shown = [body(data_uri(picture(f"shared {number}")), uuid=f"u{number}") for number in (1, 2)]
    await until_both_have(pair, *shown * 4)
    after = pair.samples("mmrouter_hf_processor_runs", side="frontend")
    # Once, although several showed it to both at the same time.
    assert sum(after.values()) - sum(before.values()) == 2
    named = body(None)
    named["messages"][0]["content"].insert(
        0, {"type": "image_url", "image_url": None, "uuid": "u1"}
    )
    await until_both_have(pair, *[named] * 4)
    assert pair.samples("mmrouter_hf_processor_runs", side="frontend") == after


async def test_decisions_are_found_whoever_made_them(pair: Pair) -> None:
    await pair.both_serve()
    answers = await until_both_have(pair, *[body(None, "who decided")] * 4)
    ids = [answer.json()["id"] for answer in answers]
    found = {one: pair.get(f"/mmrouter/decisions?request_id={one}").json() for one in ids}
    assert {len(decisions) for decisions in found.values()} == {1}
    assert {decisions[0]["process"] for decisions in found.values()} == {"0", "1"}
    last = pair.get(f"/mmrouter/decisions?last={len(ids)}").json()
    assert [one["time"] for one in last] == sorted((o["time"] for o in last), reverse=True)
    assert len(last) == len(ids)
    assert pair.get("/mmrouter/workers/refused").json() == []


async def test_metrics_are_of_all_processes(pair: Pair) -> None:
    await pair.both_serve()
    assert set(pair.samples("process_resident_memory_bytes")) == {"0", "1"}
    assert set(pair.samples("vllm:cache_config_info")) <= {"0", "1"}
    used = pair.samples("mmrouter_arena_bytes_used")
    assert used.pop("parent") >= 0 and set(used.values()) == {0.0}


async def test_a_killed_process_takes_nobody_elses_request_along(pair: Pair) -> None:
    await pair.both_serve()
    before = pair.pids()
    stop = asyncio.Event()
    wrong: list[object] = []
    url = data_uri(picture("under load"))

    async def client(number: int) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as client:
            while not stop.is_set():
                try:
                    answer = await client.post(
                        f"{pair.frontend.url}/v1/chat/completions",
                        json=body(url if number % 2 else None),
                    )
                except httpx.TransportError:
                    continue  # it was the killed one's
                if answer.status_code != 200:
                    wrong.append((answer.status_code, answer.text))

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    victim = before["1"]
    os.kill(victim, signal.SIGKILL)
    await until(lambda: pair.samples("mmrouter_child_restarts_total").get("parent", 0.0) >= 1)
    await pair.both_serve()
    stop.set()
    await asyncio.gather(*clients)
    assert not wrong
    assert victim not in pair.pids().values() and before["0"] in pair.pids().values()
    runs = pair.samples("mmrouter_hf_processor_runs", side="frontend")
    await until_both_have(pair, *[body(url)] * 4)
    assert pair.samples("mmrouter_hf_processor_runs", side="frontend") == runs
    await until(lambda: sum(pair.samples("mmrouter_arena_leases").values()) == 0)


@pytest.mark.timeout(600)
async def test_all_drain_together_and_nothing_stays(pair: Pair) -> None:
    await pair.both_serve()
    pids = [pair.frontend.pid, *pair.pids().values()]
    for pid in pids:  # as a service manager signals all of them
        os.kill(pid, signal.SIGTERM)
    assert await asyncio.to_thread(pair.frontend.wait, LIMIT_S) == 0
    assert not any(map(psutil.pid_exists, pids))
    await until(lambda: not shared_memory_of(*pids))  # another may be removing it

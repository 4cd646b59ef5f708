"""Workers, frontend and etcd on hosts that share nothing but a network: hosts that can't be
reached, that move, and whose clocks differ.
"""

import itertools
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.discovery.etcd.discovery import LEASE_S
from tests.e2e.apart import OBSTACLES, FarFrontend, Site, open_site, wrong_clock
from tests.e2e.conftest import LetGo
from tests.e2e.processes import Process, forks_with
from tests.fakes import letters

pytestmark = OBSTACLES

OFF_S = {"slow": -420, "fast": 300}
"""How far the clocks of the two workers are off."""


@dataclass(frozen=True)
class Desk:
    """A fleet that is asked for letters.

    Attributes:
        workers: they say letters, and their clocks are wrong.
        reader: the frontend.
        began: when all were there, in monotonic seconds.
    """

    site: Site
    workers: dict[str, Process]
    reader: FarFrontend
    began: float


@pytest.fixture(scope="module")
def desk(model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo) -> Iterator[Desk]:
    directory = tmp_path_factory.mktemp("desk")
    with (
        open_site("desk", model, directory, (*OFF_S, "reader")) as site,
        forks_with(wrong_clock(directory, 0)),
    ):
        workers = {name: start(site, name) for name in OFF_S}
        reader = site.frontend("reader", "--request-timeout=120")
        try:
            reader.until(lambda: reader.exact() == set(OFF_S))
            yield Desk(site, workers, reader, time.monotonic())
        finally:
            let_go(*workers.values(), reader)


def start(site: Site, name: str) -> Process:
    """A worker where its host is now."""
    return site.worker(name, env=wrong_clock(site.directory, OFF_S[name]))


class Answer:
    """Letters as a client gets them, one by one."""

    LETTERS = 400

    def __init__(self, frontend: FarFrontend, prompt: list[int], count: int = LETTERS) -> None:
        self.prompt = prompt
        self.text = ""
        self.response_id = ""
        self._expected = letters.text(len(prompt), count)
        body = {
            "model": "demo", "prompt": prompt, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        self._asking = frontend.http.stream("POST", "/v1/completions", json=body)
        self._reply = self._asking.__enter__()
        assert self._reply.status_code == 200, self._reply.read()
        self._lines = self._reply.iter_lines()

    def read(self, count: int) -> None:
        """Read until there are so many."""
        while len(self.text) < count:
            event = json.loads(next(line for line in self._lines if line).removeprefix("data: "))
            assert "error" not in event, event
            self.response_id = event["id"]
            self.text += event["choices"][0]["text"]

    def finish(self) -> None:
        """Read to the end. All of it must be there, and nothing twice."""
        self.read(len(self._expected))
        assert self.text == self._expected
        assert [line for line in self._lines if line][-1] == "data: [DONE]"
        self._asking.__exit__(None, None, None)


def prompt_of(seed: int) -> list[int]:
    """Tokens of three blocks and some, that no other prompt begins with."""
    return [30 + seed // 100, 30 + seed % 100, *range(100, 200)]


def server_of(desk: Desk) -> str:
    """The worker that has the one request there is."""
    (name,) = (name for name, view in desk.reader.workers().items() if view["active_requests"])
    return name


def held(desk: Desk, tokens: list[int]) -> dict[str, int]:
    """Leading blocks of a prompt that each worker holds, as far as the frontend knows."""
    answer = Answer(desk.reader, tokens, 1)
    answer.finish()
    candidates = desk.reader.decision(answer.response_id)["candidates"]
    return {each["worker_id"]: each["overlap_blocks"] for each in candidates}


def served_by_each(reader: FarFrontend, seed: int) -> dict[str, dict[str, Any]]:
    """Ask until each worker has answered; the decisions by worker."""
    decisions: dict[str, dict[str, Any]] = {}
    for number in itertools.count(seed):
        answer = Answer(reader, prompt_of(number), 5)
        answer.finish()
        decision = reader.decision(answer.response_id)
        decisions[decision["worker_id"]] = decision
        if decisions.keys() == set(OFF_S):
            break
    return decisions


def test_a_partition_costs_no_letter_and_heals_by_itself(desk: Desk) -> None:
    """The worker goes on meanwhile and nobody hears it. Once it can be reached it serves again, and
    what it stored in that time is known.
    """
    reader = desk.reader
    incarnations = {name: view["incarnation"] for name, view in reader.workers().items()}
    migrations = reader.metric("mmrouter_migrations_total", how="continued")
    answer = Answer(reader, prompt_of(1))
    answer.read(20)
    lost = server_of(desk)
    with desk.site.lan.cut(desk.site.hosts[lost]):
        answer.finish()
        assert reader.exact() == set(OFF_S) - {lost}
    assert reader.metric("mmrouter_migrations_total", how="continued") == migrations + 1
    reader.until(lambda: reader.exact() == set(OFF_S))
    found = {name: view["incarnation"] for name, view in reader.workers().items()}
    assert found == incarnations
    tokens = letters.letter_tokens(str(desk.site.model))
    whole = [*answer.prompt, *(tokens[each] for each in answer.text)]
    blocks = len(whole) // 32
    assert held(desk, whole) == {"slow": blocks, "fast": blocks}


def test_the_fleet_goes_on_while_etcd_is_out_of_reach(desk: Desk) -> None:
    """For the frontend, for which cards hold, and for a worker whose card goes with its lease."""
    reader, store = desk.reader, desk.site.hosts["store"]
    before = reader.metric("mmrouter_discovery_errors_total", reason="listing")
    with desk.site.lan.cut(store, desk.site.hosts["fast"]):
        with desk.site.lan.cut(store, reader.host):
            reader.until(
                lambda: reader.metric("mmrouter_discovery_errors_total", reason="listing") > before
            )
            Answer(reader, prompt_of(2), 40).finish()
            reader.until(lambda: not desk.site.published("fast"))
            assert reader.exact() == set(OFF_S)
        reader.until(lambda: "no card but a live link" in reader.log.read_text())
        assert reader.exact() == set(OFF_S)
    reader.until(lambda: desk.site.published("fast"))
    Answer(reader, prompt_of(3), 40).finish()


def test_a_worker_gets_another_address(desk: Desk) -> None:
    """It can't know what others call it, so it is started again with the new one."""
    reader, host = desk.reader, desk.site.hosts["fast"]
    former = reader.workers()["fast"]
    assert host.address in former["request_endpoint"]
    desk.site.lan.move(host)
    desk.workers["fast"].stop()
    desk.workers["fast"] = start(desk.site, "fast")
    reader.until(lambda: host.address in reader.workers()["fast"]["request_endpoint"])
    reader.until(lambda: reader.exact() == set(OFF_S))
    assert reader.workers()["fast"]["incarnation"] != former["incarnation"]
    assert served_by_each(reader, 200)


@pytest.mark.skipif(shutil.which("cc") is None, reason="wrong clocks need a C compiler (cc)")
def test_clocks_that_are_minutes_apart(desk: Desk) -> None:
    """Leases, deadlines and figures are of one clock each, and no two of them are compared."""
    reader = desk.reader
    for name, off in OFF_S.items():
        log = desk.workers[name].log
        (*_, said) = re.findall(r"^[A-Z]+ (\S+ \S+) \[", log.read_text(), re.M)
        theirs = time.mktime(time.strptime(said, "%Y-%m-%d %H:%M:%S"))
        assert abs(log.stat().st_mtime + off - theirs) < 60, said
    for decision in served_by_each(reader, 100).values():
        assert abs(decision["time"] - time.time()) < 60
    assert reader.metric("mmrouter_deadlines_exceeded_total") == 0
    assert 0 <= reader.metric("mmrouter_time_to_first_token_seconds_sum") < 60
    # Longer than a lease.
    lapse = desk.began + 1.5 * LEASE_S
    while time.monotonic() < lapse:
        assert reader.exact() == set(OFF_S)
        time.sleep(0.5)

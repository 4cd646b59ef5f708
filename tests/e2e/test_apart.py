"""Frontends, workers and etcd on hosts that share nothing but a network: no shared memory, no
loopback, no clock.
"""

import contextlib
import itertools
import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common import fleet_key
from common.discovery.etcd.publisher import LEASE_S
from tests.e2e import hosts
from tests.e2e.apart import FarFrontend, Site, etcd_on, stranger, wrong_clock
from tests.e2e.conftest import LetGo
from tests.e2e.hosts import Host, Lan, open_lan
from tests.e2e.lab import image, words
from tests.e2e.processes import Process
from tests.fakes import letters
from tests.fakes.etcd import BINARIES, NO_ETCD
from tests.pictures import data_uri, picture

pytestmark = [
    pytest.mark.skipif(bool(hosts.obstacle()), reason=hosts.obstacle()),
    pytest.mark.skipif(BINARIES is None, reason=NO_ETCD),
]

NIXL_OUT = ("--nixl-allow-tcp", "--nixl-interface=eth0")

SLOW_S, FAST_S = -420, 300
"""How far the clocks of two workers are off."""


@dataclass(frozen=True)
class Land:
    """Two fleets on one network, with the names that their hosts have.

    Attributes:
        plain, nixl: frontends of ``engine``, a worker of vLLM's. It lets NIXL out over TCP, and of
            the frontends only the second does.
        reader: frontend of ``slow`` and ``fast``, workers that say letters and whose clocks are
            wrong.
        pictures, words: the two fleets.
        processes: workers and frontends by name.
        began: when all were there, in monotonic seconds.
    """

    lan: Lan
    hosts: dict[str, Host]
    plain: FarFrontend
    nixl: FarFrontend
    reader: FarFrontend
    pictures: Site
    words: Site
    processes: dict[str, Process]
    began: float


@pytest.fixture(scope="module")
def land(model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo) -> Iterator[Land]:
    directory = tmp_path_factory.mktemp("land")
    key = directory / "fleet.key"
    fleet_key.new(key)
    with contextlib.ExitStack() as stays:
        lan = stays.enter_context(open_lan())
        names = ("store", "engine", "slow", "fast", "plain", "nixl", "reader", "stranger")
        places = {name: lan.host(name) for name in names}
        etcd = stays.enter_context(etcd_on(places["store"], directory))
        pictures, said = (Site(name, model, etcd, key, directory) for name in ("pictures", "words"))
        started: dict[str, Process] = {}
        stays.callback(lambda: let_go(*started.values()))
        started["engine"] = pictures.worker(places["engine"], *NIXL_OUT, module="backend_worker")
        etcd.until_ready()
        for name, off in (("slow", SLOW_S), ("fast", FAST_S)):
            started[name] = said.worker(places[name], env=wrong_clock(directory, off))
        reader = said.frontend(places["reader"], "reader", "--request-timeout=120")
        plain = pictures.frontend(places["plain"], "plain")
        nixl = pictures.frontend(places["nixl"], "nixl", *NIXL_OUT)
        started |= {"reader": reader, "plain": plain, "nixl": nixl}
        reader.until(lambda: reader.exact() == {"slow", "fast"})
        plain.until(lambda: plain.exact() == {"engine"})
        nixl.until(lambda: nixl.exact() == {"engine"})
        yield Land(lan, places, plain, nixl, reader, pictures, said, started, time.monotonic())


def describe(frontend: FarFrontend, name: str, salt: str) -> tuple[str, list[dict[str, Any]]]:
    """What the engine says about a picture, and how that got there. What others sent under
    another salt it doesn't know.
    """
    content = [image(data_uri(picture(name))), words("What is this?")]
    reply = frontend.http.post(
        "/v1/chat/completions",
        json={
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            "temperature": 0,
            "cache_salt": salt,
        },
    )
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["message"]["content"], frontend.decision(answer["id"])["media"]


def test_media_of_another_host_come_inline_or_by_nixl_where_it_is_let_out(land: Land) -> None:
    """Shared memory is offered, and not taken since it is another's."""
    ways: dict[str, set[str]] = {}
    answers: dict[str, set[str]] = {}
    land.nixl.until(lambda: land.nixl.workers()["engine"]["transport"] == "nixl")
    for frontend in (land.plain, land.nixl):
        for name in ("near", "far"):
            text, moves = describe(frontend, name, frontend.name)
            answers.setdefault(name, set()).add(text)
            ways.setdefault(frontend.name, set()).update(move["transport"] for move in moves)
    assert ways == {"plain": {"inline"}, "nixl": {"nixl"}}
    assert [len(each) for each in answers.values()] == [1, 1], answers
    assert answers["near"] != answers["far"]
    refused = {"transport": "shm", "reason": "not_readable"}
    for frontend, used in ((land.plain, "inline"), (land.nixl, "inline")):
        assert f"media travel by {used} instead of shm: " in frontend.log.read_text()
        assert frontend.metric("mmrouter_transfer_fallbacks_total", **refused) >= 2


def test_a_bad_line_is_slow_and_nothing_else(land: Land) -> None:
    """A tenth of a second there and back, and every fiftieth packet lost."""
    ejections = [each.metric("mmrouter_ejections_total") for each in (land.plain, land.nixl)]
    with land.lan.slow(land.hosts["engine"], 0.05, 0.02):
        slow = [describe(each, "slow", f"slow-{each.name}") for each in (land.plain, land.nixl)]
    right, _ = describe(land.plain, "slow", "soon")
    assert [text for text, _ in slow] == [right, right]
    assert [{move["transport"] for move in moves} for _, moves in slow] == [{"inline"}, {"nixl"}]
    for frontend, before in zip((land.plain, land.nixl), ejections, strict=True):
        assert frontend.metric("mmrouter_ejections_total") == before


def test_a_stranger_on_the_network_gets_nothing(land: Land, tmp_path: Path) -> None:
    """Neither answers nor events, with another key or none."""
    other = tmp_path / "other.key"
    fleet_key.new(other)
    card = land.pictures.card("engine")
    (source,) = card.kv_event_sources
    endpoints = (card.request_endpoint, source.endpoint, source.replay_endpoint or "")
    host = land.hosts["stranger"]
    with (
        stranger(host, "none", *endpoints) as with_none,
        stranger(host, str(other), *endpoints) as with_another,
        stranger(host, str(land.pictures.key), *endpoints) as with_ours,
    ):
        land.plain.until(lambda: describe(land.plain, "overheard", "a stranger"))
    assert with_none == with_another == [0, 0, 0]
    assert all(with_ours), with_ours  # so there was something to be heard
    assert "without the fleet's key was refused" in land.processes["engine"].log.read_text()


def test_nothing_that_is_said_can_be_read_on_the_way(land: Land, tmp_path: Path) -> None:
    secret, known = "the heron stands in cold water at dawn", "and this is no secret to anybody"
    file = tmp_path / "frames"
    with land.lan.captured(file):
        body = {"model": "demo", "prompt": secret, "max_tokens": 8, "temperature": 0}
        said = land.plain.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        host, there = land.hosts["stranger"], land.hosts["store"].address
        shout = f"socket.socket(type=socket.SOCK_DGRAM).sendto(b{known!r}, ({there!r}, 9))"
        host.run(sys.executable, "-c", f"import socket; {shout}")
    frames = file.read_bytes()
    assert known.encode() in frames
    assert secret.encode() not in frames
    assert said.encode() not in frames
    address = socket.inet_aton(land.hosts["engine"].address)
    assert address in frames


class Answer:
    """Letters as a client gets them, one by one."""

    LETTERS = 600

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
    return [1000 + seed, *range(100, 200)]


def server_of(land: Land) -> str:
    """The worker that has the one request there is."""
    (name,) = (name for name, view in land.reader.workers().items() if view["active_requests"])
    return name


def held(land: Land, tokens: list[int]) -> dict[str, int]:
    """Leading blocks of a prompt that each worker holds, as far as the frontend knows."""
    answer = Answer(land.reader, tokens, 1)
    answer.finish()
    considered = land.reader.decision(answer.response_id)["considered"]
    return {each["worker_id"]: each["overlap_blocks"] for each in considered}


def served_by_each(reader: FarFrontend, seed: int) -> dict[str, dict[str, Any]]:
    """Ask until each worker has answered; the decisions by worker."""
    decisions: dict[str, dict[str, Any]] = {}
    for number in itertools.count(seed):
        answer = Answer(reader, prompt_of(number), 5)
        answer.finish()
        decision = reader.decision(answer.response_id)
        decisions[decision["worker_id"]] = decision
        if decisions.keys() == {"slow", "fast"}:
            break
    return decisions


def test_a_partition_costs_no_letter_and_heals_by_itself(land: Land) -> None:
    """The worker goes on meanwhile and nobody hears it. Once it can be reached it serves again, and
    what it stored in that time is known.
    """
    reader = land.reader
    incarnations = {name: view["incarnation"] for name, view in reader.workers().items()}
    migrations = reader.metric("mmrouter_migrations_total", how="continued")
    answer = Answer(reader, prompt_of(1))
    answer.read(20)
    lost = server_of(land)
    with land.lan.cut(land.hosts[lost]):
        answer.finish()
        assert reader.exact() == {"slow", "fast"} - {lost}
    assert reader.metric("mmrouter_migrations_total", how="continued") == migrations + 1
    reader.until(lambda: reader.exact() == {"slow", "fast"})
    found = {name: view["incarnation"] for name, view in reader.workers().items()}
    assert found == incarnations
    tokens = letters.letter_tokens(str(land.words.model))
    whole = [*answer.prompt, *(tokens[each] for each in answer.text)]
    blocks = len(whole) // 32
    assert held(land, whole) == {"slow": blocks, "fast": blocks}


def test_the_fleet_goes_on_while_etcd_is_out_of_reach(land: Land) -> None:
    """For the frontend, for which cards hold, and for a worker whose card goes with its lease."""
    reader, store = land.reader, land.hosts["store"]
    before = reader.metric("mmrouter_discovery_errors_total", reason="listing")
    with land.lan.cut(store, land.hosts["fast"]):
        with land.lan.cut(store, reader.host):
            reader.until(
                lambda: reader.metric("mmrouter_discovery_errors_total", reason="listing") > before
            )
            Answer(reader, prompt_of(2), 40).finish()
            reader.until(lambda: not land.words.published("fast"))
            assert reader.exact() == {"slow", "fast"}
        reader.until(lambda: "but its link lives: it stays" in reader.log.read_text())
        assert reader.exact() == {"slow", "fast"}
    reader.until(lambda: land.words.published("fast"))
    Answer(reader, prompt_of(3), 40).finish()


def test_a_worker_gets_another_address(land: Land) -> None:
    """It can't know what others call it, so it is started again with the new one."""
    reader, host = land.reader, land.hosts["fast"]
    former = reader.workers()["fast"]
    assert host.address in former["request_endpoint"]
    land.lan.move(host)
    land.processes["fast"].stop()
    land.processes["fast"] = land.words.worker(host, env=wrong_clock(land.words.directory, FAST_S))
    reader.until(lambda: host.address in reader.workers()["fast"]["request_endpoint"])
    reader.until(lambda: reader.exact() == {"slow", "fast"})
    assert reader.workers()["fast"]["incarnation"] != former["incarnation"]
    assert served_by_each(reader, 200)


@pytest.mark.skipif(shutil.which("cc") is None, reason="wrong clocks need a C compiler (cc)")
def test_clocks_that_are_minutes_apart(land: Land) -> None:
    """Leases, deadlines and figures are of one clock each, and no two of them are compared."""
    reader = land.reader
    for name, off in (("slow", SLOW_S), ("fast", FAST_S)):
        environment = Path(f"/proc/{land.processes[name].pid}/environ").read_bytes()
        assert f"WALL_CLOCK_OFF={off}".encode() in environment
    for decision in served_by_each(reader, 100).values():
        assert abs(decision["time"] - time.time()) < 60
    assert reader.metric("mmrouter_deadlines_exceeded_total") == 0
    assert 0 <= reader.metric("mmrouter_time_to_first_token_seconds_sum") < 60
    # Longer than a lease.
    lapse = land.began + 1.5 * LEASE_S
    while time.monotonic() < lapse:
        assert reader.exact() == {"slow", "fast"}
        time.sleep(0.5)

"""A worker of vLLM's and its frontends on hosts that share nothing but a network: how media get
there, and who may listen.
"""

import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common import fleet_key
from tests.e2e.apart import OBSTACLES, FarFrontend, Site, open_site, overheard
from tests.e2e.conftest import LetGo
from tests.e2e.lab import image, words
from tests.e2e.processes import Process
from tests.pictures import data_uri, picture

pytestmark = OBSTACLES

NIXL_OUT = ("--nixl-allow-tcp", "--nixl-interface=eth0")


@dataclass(frozen=True)
class Gallery:
    """A fleet that is asked about pictures.

    Attributes:
        engine: the worker; it lets NIXL out over TCP.
        plain: a frontend that doesn't.
        nixl: one that does.
    """

    site: Site
    engine: Process
    plain: FarFrontend
    nixl: FarFrontend


@pytest.fixture(scope="module")
def gallery(
    model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo
) -> Iterator[Gallery]:
    hosts = ("engine", "plain", "nixl", "stranger")
    with open_site("gallery", model, tmp_path_factory.mktemp("gallery"), hosts) as site:
        engine = site.worker("engine", *NIXL_OUT, module="backend_worker")
        plain = site.frontend("plain")
        nixl = site.frontend("nixl", *NIXL_OUT)
        try:
            plain.until(lambda: plain.exact() == {"engine"})
            nixl.until(lambda: nixl.exact() == {"engine"})
            nixl.until(lambda: nixl.workers()["engine"]["transport"] == "nixl")
            yield Gallery(site, engine, plain, nixl)
        finally:
            let_go(engine, plain, nixl)


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


def test_media_of_another_host_come_inline_or_by_nixl_where_it_is_let_out(gallery: Gallery) -> None:
    """Shared memory is offered, and not taken since it is another's."""
    ways: dict[str, set[str]] = {}
    answers: dict[str, set[str]] = {}
    for frontend in (gallery.plain, gallery.nixl):
        for name in ("near", "far"):
            text, moves = describe(frontend, name, frontend.name)
            answers.setdefault(name, set()).add(text)
            ways.setdefault(frontend.name, set()).update(move["transport"] for move in moves)
    assert ways == {"plain": {"inline"}, "nixl": {"nixl"}}
    assert [len(each) for each in answers.values()] == [1, 1], answers
    assert answers["near"] != answers["far"]
    refused = {"transport": "shm", "reason": "not_readable"}
    for frontend in (gallery.plain, gallery.nixl):
        assert " instead of shm: can't open the arena " in frontend.log.read_text()
        assert frontend.metric("mmrouter_transfer_fallbacks_total", **refused) >= 2


def test_a_bad_line_is_slow_and_nothing_else(gallery: Gallery) -> None:
    """A tenth of a second there and back, and every fiftieth packet lost."""
    both = (gallery.plain, gallery.nixl)
    ejections = [each.metric("mmrouter_ejections_total") for each in both]
    with gallery.site.lan.slow(gallery.site.hosts["engine"], 0.05, 0.02):
        slow = [
            describe(each, "slow", f"slow-{each.name}") for each in (gallery.plain, gallery.nixl)
        ]
    right, _ = describe(gallery.plain, "slow", "soon")
    assert [text for text, _ in slow] == [right, right]
    assert [{move["transport"] for move in moves} for _, moves in slow] == [{"inline"}, {"nixl"}]
    for frontend, before in zip(both, ejections, strict=True):
        assert frontend.metric("mmrouter_ejections_total") == before


def test_a_stranger_on_the_network_gets_nothing(gallery: Gallery, tmp_path: Path) -> None:
    """Neither answers nor events, with another key or none."""
    other = tmp_path / "other.key"
    fleet_key.new(other)
    with_none, with_another, with_ours = overheard(
        gallery.site.hosts["stranger"],
        gallery.site.card("engine"),
        (None, other, gallery.site.key),
        lambda number: describe(gallery.plain, f"overheard-{number}", "a stranger"),
    )
    assert with_none == with_another == [0, 0, 0]
    assert all(with_ours), with_ours  # so there was something to be heard
    assert "without the fleet's key was refused" in gallery.engine.log.read_text()


def test_nothing_that_is_said_can_be_read_on_the_way(gallery: Gallery, tmp_path: Path) -> None:
    secret, known = "the heron stands in cold water at dawn", "and this is no secret to anybody"
    file = tmp_path / "frames"
    with gallery.site.lan.captured(file):
        body = {"model": "demo", "prompt": secret, "max_tokens": 8, "temperature": 0}
        said = gallery.plain.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        host, there = gallery.site.hosts["stranger"], gallery.site.hosts["store"].address
        shout = f"socket.socket(type=socket.SOCK_DGRAM).sendto(b{known!r}, ({there!r}, 9))"
        host.run(sys.executable, "-c", f"import socket; {shout}")
    frames = file.read_bytes()
    assert known.encode() in frames
    assert secret.encode() not in frames
    assert said.encode() not in frames
    address = socket.inet_aton(gallery.site.hosts["engine"].address)
    assert address in frames

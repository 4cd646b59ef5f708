"""Nothing of a client names a file, a host or code, but through the policy of media.

Each string that a client may send is an address, a path, a repository or a module once: in all
bodies, forms, parameters and headers of all routes that a frontend's own description has. What
frontend and worker touch is watched: see ``tests/fuzz_http/canaries.py``.
"""

import http.client
import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.families.stack import make_model
from tests.fuzz_http.campaign import AN_ANSWER, by_policy, names_media, of_a_template
from tests.fuzz_http.canaries import Canaries, Touch
from tests.fuzz_http.fleet import KINDS, SPEECH, TRUSTING, Fleet, Kind
from tests.fuzz_http.planting import Plant, Planting
from tests.fuzz_http.requests import GOOD, MODEL
from tests.fuzz_http.schema import Call

ANSWER_S = 120.0
CLIENTS = 4
"""Of a frontend. Canaries have numbers, so what is touched tells whose it was."""

OPENED = Kind(
    ("--enable-prompt-embeds", "--enable-mm-embeds", "--enable-lora"),
    (
        *TRUSTING, "--enable-auto-tool-choice", "--tool-call-parser=hermes", "--tool-server=demo",
        "--media-allow-private", "--allowed-local-media-path={files}",
        "--enable-server-load-tracking", "--enable-request-id-headers",
    ),
    {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
)  # fmt: skip
"""With all flags that open something to clients."""

BY_DEFAULT = {
    "chat": KINDS["chat"],
    "embed": KINDS["embed"],
    "rerank": KINDS["rerank"],
    "speech": SPEECH,
}
GENERATE = ("chat", "speech")
"""Have the same routes in common, of which the first gets the canaries. Models that pool read the
same bodies in different ways."""

SOWN = BY_DEFAULT | {"opened": OPENED}

WRITES_NO_GRAMMAR = re.compile("structured_outputs|response_format")
"""Fields that simulated engines do not follow, so that vLLM's scheduler ends the request."""

THIN = frozenset({"/v1/responses", "/v1/responses/render"})
"""Thousands of fields, which read nothing else if something is opened: each name gets a canary
once. By default each field does."""


@dataclass(frozen=True)
class Sown:
    """A fleet to which all canaries were sent.

    Attributes:
        touched: what was, and by which request.
        answered: requests with status 200, by their route.
        failed: requests that got no answer, or a status that blames the server.
    """

    plants: list[Plant]
    touched: list[tuple[Plant | None, Touch]]
    answered: Counter[str]
    failed: list[str]


class Sower:
    """Sends canaries to one fleet, by several clients at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self._where = urlsplit(fleet.frontend.url)
        self._clients = threading.local()
        self._lock = threading.Lock()
        self.answered = Counter[str]()
        self.failed: list[str] = []

    def send(self, plant: Plant) -> None:
        status = self._ask(plant)
        with self._lock:
            if status == 200:
                self.answered[plant.call[1]] += 1
            elif (not status or status >= 500) and status != AN_ANSWER:
                self.failed.append(f"{status}: {plant}")

    def _ask(self, plant: Plant) -> int:
        if not hasattr(self._clients, "connection"):
            host, port = self._where.hostname or "", self._where.port
            self._clients.connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        connection: http.client.HTTPConnection = self._clients.connection
        try:
            connection.request(plant.call[0], plant.path, plant.body or None, dict(plant.headers))
            reply = connection.getresponse()
            reply.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            return 0
        if reply.status >= 500:
            connection.close()  # as the server does
        return reply.status


@dataclass
class Fields:
    """The fleets of this module; the next one starts while canaries are sent to one."""

    canaries: Canaries
    models: dict[str, Path]
    directory: Path
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _fleets: dict[str, Fleet] = field(default_factory=dict)
    _sown: dict[str, Sown] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)
    _done: set[str] = field(default_factory=set)
    _planted: dict[int, Plant] = field(default_factory=dict)

    def sown(self, name: str) -> Sown:
        if name not in self._sown:
            fleet = self._fleet(name)
            fleet.wait()
            for later in [*SOWN][[*SOWN].index(name) + 1 :][:1]:
                self._fleet(later)
            try:
                self._sown[name] = self._sow(name, fleet)
            finally:
                fleet.stop()
        return self._sown[name]

    def stop(self) -> None:
        for fleet in self._fleets.values():
            fleet.stop()

    def _fleet(self, name: str) -> Fleet:
        if name not in self._fleets:
            kind = SOWN[name]
            flags = [each.format(files=self.canaries.files) for each in kind.frontend]
            kind = Kind(kind.worker, tuple(flags), kind.environment, kind.caches)
            model = self.models.get(name, self.models[""])
            self._fleets[name] = Fleet(kind, model, self.directory / name, self.canaries)
        return self._fleets[name]

    def _sow(self, name: str, fleet: Fleet) -> Sown:
        api = fleet.api()
        known, thin = (set[str](), THIN) if name == "opened" else (self._known, frozenset[str]())
        done = self._done if name in GENERATE else set[str]()
        planting = Planting(api, self.canaries, self._numbers, known, thin)
        bodies = {route.path: route.schema for route in api.routes}
        plants = []
        for call in sorted(api.calls, key=_first_those_that_read_most):
            if (known_as := f"{call} {bodies.get(call.path)}") not in done:
                of_call = list(planting.plants(call))
                assert of_call, f"{call.method} {call.path} has no canary"
                plants += of_call
                done.add(known_as)
        # Kept from then on; several clients at once would each have it made, by calls of pip.
        httpx.get(f"{fleet.frontend.url}/server_info", timeout=ANSWER_S)
        sower = Sower(fleet)
        with ThreadPoolExecutor(CLIENTS) as pool:
            for _ in pool.map(sower.send, plants):
                pass
        assert not fleet.dead()
        self._still_answers(fleet)
        self._planted |= {plant.number: plant for plant in plants}
        touched = [(self._planted.get(each.number or 0), each) for each in self.canaries.touched()]
        return Sown(plants, touched, sower.answered, sower.failed)

    def _still_answers(self, fleet: Fleet) -> None:
        for route in fleet.api().routes:
            if route.path in GOOD and not route.form:
                url = f"{fleet.frontend.url}{route.path}"
                reply = httpx.post(url, json=MODEL | GOOD[route.path], timeout=ANSWER_S)
                assert reply.status_code == 200, f"{route.path}: {reply.text}"


def _first_those_that_read_most(call: Call) -> int:
    """Fields that several routes have are planted in full in the first of these."""
    order = ("/v1/chat/completions", "/v1/responses", "/v1/embeddings")
    if call.path == "/invocations":
        return len(order) + 1
    return order.index(call.path) if call.path in order else len(order)


@pytest.fixture(scope="module")
def fields(
    model: Path, canaries: Canaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fields]:
    directory = tmp_path_factory.mktemp("fields")
    whisper = make_model("whisper", directory, directory)
    fields = Fields(canaries, {"": model, "speech": whisper}, directory)
    try:
        yield fields
    finally:
        fields.stop()


def told(touched: Sequence[tuple[Plant | None, Touch]]) -> str:
    return "\n".join(f"{plant}: {touch}" for plant, touch in touched[:20])


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_by_default_nothing_is_touched(fields: Fields, name: str) -> None:
    sown = fields.sown(name)
    found = [
        (plant, touch)
        for plant, touch in sown.touched
        if plant is None or not by_policy(plant.ways, touch)
    ]
    assert not found, told(found)
    if name != "speech":  # which has no media but what is uploaded
        assert sown.touched, "names of servers are looked up, so the witnesses are asleep"


def test_opened_to_all_only_media_reach_out(fields: Fields) -> None:
    sown = fields.sown("opened")
    found = [
        (plant, touch)
        for plant, touch in sown.touched
        if not (plant and (names_media(plant.ways) or of_an_adapter(plant)))
        and not (plant and of_a_template(plant.ways, touch))
        and not is_counted(touch, fields.canaries)
    ]
    assert not found, told(found)
    if fields.canaries.seen_by_library:
        media = [touch for plant, touch in sown.touched if plant and names_media(plant.ways)]
        assert any(touch.call.startswith("open") for touch in media)
        assert any(touch.call == "accept" for touch in media)


@pytest.mark.parametrize("name", SOWN)
def test_the_server_takes_no_blame(fields: Fields, name: str) -> None:
    failed = [each for each in fields.sown(name).failed if not WRITES_NO_GRAMMAR.search(each)]
    assert not failed, "\n".join(failed[:20])


@pytest.mark.parametrize("name", SOWN)
def test_canaries_get_far(fields: Fields, name: str) -> None:
    """What is refused at the door alone finds nothing."""
    sown = fields.sown(name)
    assert len(sown.plants) > 300
    routes = {plant.call[1] for plant in sown.plants if plant.body}
    assert {path for path in routes & GOOD.keys() if not sown.answered[path]} == set()


def of_an_adapter(plant: Plant) -> bool:
    """Admins name a directory, and workers open it."""
    return any("lora_path" in way for way in plant.ways)


def is_counted(touch: Touch, canaries: Canaries) -> bool:
    """A connection to the canaries' server, which says itself who asked for what."""
    return touch.call == "connect" and touch.about == f"127.0.0.1 {canaries.port}"

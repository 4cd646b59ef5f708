"""Nothing of a client names a file, a host or code, but through the policy of media.

Each string of each schema of the API is an address, a path, a repository or a module once, and
what frontend and worker touch is watched: see ``tests/fuzz_http/canaries.py``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import LetGo
from tests.fuzz_http.campaign import Campaign, Figures, by_policy, names_media
from tests.fuzz_http.canaries import Canaries, Touch
from tests.fuzz_http.fleet import KINDS, Fleet, Kind
from tests.fuzz_http.planting import Planting
from tests.fuzz_http.requests import Request

Touched = tuple[Request, Touch]

ELSEWHERE = "/invocations"
"""Takes what the other routes take, and hands it to them."""

DEEP = ("/v1/responses", "/v1/chat/completions/batch")
"""Their parts are those of the other routes, and thousands. By default they are sent too."""


@dataclass(frozen=True)
class Sown:
    """A fleet to which all canaries were sent.

    Attributes:
        touched: what was, and by which request.
    """

    requests: int
    touched: list[Touched]
    canaries: Canaries


def sow(
    kind: Kind, model: Path, directory: Path, let_go: LetGo, *left_out: str, flags: tuple[str, ...]
) -> Sown:
    canaries = Canaries(directory)
    flags = tuple(flag.format(files=canaries.files) for flag in flags)
    fleet = Fleet(kind, model, directory / "fleet", canaries, *flags)
    try:
        fleet.wait()
        campaign = Campaign(fleet, canaries, Figures(seed=0))
        api = fleet.api()
        planting = Planting(api)
        canaries.touched()
        count, touched = 0, list[Touched]()
        for route in api.routes:
            if route.form or route.path.startswith(left_out):
                continue
            for request in planting.requests(route):
                campaign.ask(request.path.format(worker_id="w"), canaries.fill(request.body))
                touched += [(request, touch) for touch in canaries.touched()]
                count += 1
        assert not fleet.dead()
        return Sown(count, touched, canaries)
    finally:
        canaries.close()
        let_go(fleet.frontend, fleet.worker)


@pytest.fixture(scope="module")
def by_default(
    model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo
) -> Iterator[Sown]:
    directory = tmp_path_factory.mktemp("canaries")
    yield sow(KINDS["chat"], model, directory, let_go, ELSEWHERE, flags=())


@pytest.fixture(scope="module")
def opened(model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo) -> Iterator[Sown]:
    """With all flags that open something to clients."""
    directory = tmp_path_factory.mktemp("opened")
    media = ("--media-allow-private", "--allowed-local-media-path={files}")
    kind = KINDS["trusting"]
    yield sow(kind, model, directory, let_go, ELSEWHERE, *DEEP, flags=media)


def told(touched: list[Touched]) -> str:
    return "\n".join(f"{request.shape}: {touch}" for request, touch in touched[:20])


def test_by_default_nothing_is_touched(by_default: Sown) -> None:
    assert by_default.requests > 2000
    found = [each for each in by_default.touched if not by_policy(*each)]
    assert not found, told(found)
    assert by_default.touched, "names of servers are looked up, so the witnesses are asleep"


def test_opened_to_all_only_media_reach_out(opened: Sown) -> None:
    found = [
        (request, touch)
        for request, touch in opened.touched
        if not names_media(request) and not of_a_template(request, touch)
    ]
    assert not found, told(found)
    if opened.canaries.seen_by_library:
        calls = [touch.call for request, touch in opened.touched if names_media(request)]
        assert any(call.startswith("open") for call in calls)
        assert "connect" in calls


def of_a_template(request: Request, touch: Touch) -> bool:
    """A template of a client's is compiled, in Jinja's sandbox, where requests may bring one."""
    return touch.call == "compile" and "chat_template" in {
        *request.bad,
        *re.findall(r"\w+", request.shape),
    }

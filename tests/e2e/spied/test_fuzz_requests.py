"""A short run of ``make fuzz-http`` with one seed: bounded by requests and not by the clock, and
without its figures of time, so that it can't fail by chance.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.fuzz_http.campaign import Campaign, Figures
from tests.fuzz_http.canaries import Canaries
from tests.fuzz_http.fleet import KINDS, Fleet
from tests.fuzz_http.others import Others
from tests.fuzz_http.requests import GOOD, MODEL, Drawing

SEED = 1
REQUESTS = 400
OF_TIME_AND_MEMORY = ("loop_stall_s_max", "rss_growth_mb_max")

WITHOUT_BODY = ("/ping", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel")
OPERATORS = (
    "/mmrouter/", "/pause", "/release_kv_cache_memory", "/reset_", "/resume", "/sleep",
    "/start_profile", "/stop_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/wake_up",
)  # fmt: skip


@dataclass(frozen=True)
class Attacked:
    fleet: Fleet
    canaries: Canaries


@pytest.fixture(scope="module")
def attacked(
    model: Path, canaries: Canaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    fleet = Fleet(KINDS["chat"], model, tmp_path_factory.mktemp("fuzz") / "fleet", canaries)
    try:
        fleet.wait()
        yield Attacked(fleet, canaries)
    finally:
        fleet.stop()


def test_each_route_with_a_body_is_drawn(attacked: Attacked) -> None:
    """A route of the next vLLM that reads its body itself must not slip by."""
    url = attacked.fleet.frontend.url
    paths = httpx.get(f"{url}/openapi.json", timeout=60).json()["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    drawn = {route.path for route in attacked.fleet.api().routes}
    left = {path for path in posts - drawn if not path.startswith(OPERATORS)}
    assert left == set(WITHOUT_BODY)


def test_what_is_good_is_answered(attacked: Attacked) -> None:
    """Else nothing that is drawn would get far."""
    url = attacked.fleet.frontend.url
    for route in attacked.fleet.api().routes:
        if (good := GOOD.get(route.path)) is not None:
            reply = httpx.post(f"{url}{route.path}", json=MODEL | good, timeout=60)
            assert reply.status_code == 200, f"{route.path}: {reply.text}"


def test_hostile_requests_harm_nobody(attacked: Attacked) -> None:
    fleet, figures = attacked.fleet, Figures(seed=SEED)
    campaign = Campaign(fleet, attacked.canaries, figures, again=0)
    drawing = Drawing(fleet.api(), SEED)
    others = Others(fleet.frontend.url)
    attacked.canaries.touched()
    others.start()
    found = []
    try:
        for number in range(REQUESTS):
            request = drawing.request(number)
            outcome = campaign.take(request)
            if outcome.wrong and outcome.wrong not in OF_TIME_AND_MEMORY:
                found.append(f"{number}: {outcome.wrong}: {request.shape}: {outcome.figures}")
            if outcome.dead:
                break
    finally:
        others.stop()
    assert not found, "\n".join(found)
    assert not others.failed, others.failed[0]
    assert others.asked
    answered = figures.statuses.get("200", 0) + figures.statuses.get("501", 0)
    assert answered > REQUESTS / 20, "what is refused at the door alone finds nothing"

"""Frontends that share idle workers do not pile up on one of them. Time is simulated."""

import pytest

from backend_worker.plane.load_report import REPORT_PAUSE_S
from tests.fakes.crowd import Crowd, Telling

AT_ONCE = Telling(REPORT_PAUSE_S)
REGULARLY = Telling(None)


@pytest.mark.parametrize(("frontends", "workers", "rate"), [(2, 4, 8), (4, 8, 16)])
async def test_idle_workers_are_found_by_all(frontends: int, workers: int, rate: float) -> None:
    """Half of the workers are idle on average; see docs/routing.md for more of such figures."""
    told = await Crowd(frontends, workers, rate, AT_ONCE).run(600)
    untold = await Crowd(frontends, workers, rate, REGULARLY).run(600)
    assert untold.piled > 0.15 * untold.requests
    assert told.piled < 0.04 * told.requests


async def test_telling_costs_three_reports_a_request_and_listener_at_most() -> None:
    outcome = await Crowd(3, 4, 8, AT_ONCE).run(300)
    assert 0 < outcome.told <= 3 * 2 * 300


async def test_a_burst_at_all_frontends_costs_less() -> None:
    outcome = await Crowd(3, 2, 2000, AT_ONCE).run(300)
    assert outcome.told < 300


async def test_a_frontend_alone_is_told_nothing_and_piles_nothing() -> None:
    outcome = await Crowd(1, 4, 8, AT_ONCE).run(300)
    assert outcome.told == 0
    # A worker that answered is idle before its frontend can know.
    assert outcome.piled < 0.01 * outcome.requests

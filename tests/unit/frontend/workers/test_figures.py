"""Workers are asked for their own metrics over the request plane; some don't answer, some lie."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from backend_worker.plane import load_report as worker_figures
from backend_worker.plane.load_report import OwnMetrics
from backend_worker.plane.session import Session
from common.discovery.base import CardPresent
from common.errors import WorkerBusyError
from common.identity import WorkerId
from common.observability.telemetry import DECISIONS, WORKER_PAGES_MISSING
from common.request_plane.protocol import MAX_FIGURES_BYTES, AskFigures, Figures
from frontend.http.operator.merged_metrics import joined_pages
from frontend.workers import members, operations
from frontend.workers.members import Members
from tests.fakes.fleet import Town, gone
from tests.waiting import until


@pytest.fixture
async def town() -> AsyncIterator[Town]:
    town = Town()
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    yield town
    await town.close()


def registry(**gauges: float) -> CollectorRegistry:
    made = CollectorRegistry()
    for name, value in gauges.items():
        Gauge(name, "of the engine", ["engine"], registry=made).labels("0").set(value)
    return made


def counts(town: Town, **gauges: float) -> None:
    service = town.worker.service
    service._metrics = OwnMetrics(service._send, registry(**gauges))


async def nobody(session: Session, message: Figures) -> None:
    pass


def says(town: Town, page: bytes | None) -> None:
    """What the worker answers from now on; None for nothing."""

    async def tell(session: Session, number: int) -> None:
        if page is not None:
            await town.worker.service._send(session, Figures(number, page))

    town.worker.service._metrics.tell = tell  # type: ignore[method-assign]


async def text(members: Members) -> str:
    async with asyncio.timeout(60):
        return b"".join(await joined_pages(members)).decode()


def missing(reason: str) -> float:
    return WORKER_PAGES_MISSING.labels(reason)._value.get()


async def test_the_engines_metrics_are_shown_with_their_worker(town: Town) -> None:
    counts(town, running=3)
    assert (await text(town.fleet.members)) == (
        "# HELP running of the engine\n"
        "# TYPE running gauge\n"
        'running{worker_id="w0",engine="0"} 3.0\n'
    )


async def test_by_default_it_is_all_that_the_process_has(town: Town) -> None:
    assert "# TYPE mmrouter_stage_seconds histogram" in await text(town.fleet.members)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (None, "silent"),
        (b"", "too_large"),
        (b"mmrouter_workers 7\n", "malformed"),
        (b"# TYPE a gauge\na 1\n# TYPE a gauge\n", "malformed"),
    ],
)
async def test_one_that_gives_no_page_is_left_out_and_counted(
    town: Town, page: bytes | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page is None:
        monkeypatch.setattr(operations, "PAGE_TIMEOUT_S", 0.05)
    says(town, page)
    before = missing(reason)
    assert await text(town.fleet.members) == ""
    assert missing(reason) == before + 1
    assert town.fleet.connected
    link = town.fleet.link(WorkerId("w0"))
    assert not link._figures._waiting


async def test_what_comes_late_or_unasked_is_dropped(town: Town) -> None:
    service = town.worker.service
    (session,) = service._sessions.values()
    await service._send(session, Figures(99, b"# TYPE a gauge\na 1\n"))
    counts(town, running=1)
    assert "running" in await text(town.fleet.members)


async def test_a_page_beyond_the_limit_ends_the_session(town: Town) -> None:
    """No worker of ours sends one."""
    link = town.fleet.link(WorkerId("w0"))
    says(town, b"x" * (MAX_FIGURES_BYTES + 1))
    asking = asyncio.create_task(text(town.fleet.members))
    assert "can't be read" in str(await link.lost())
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_too_large_a_page_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_figures, "MAX_FIGURES_BYTES", 10)
    assert await OwnMetrics(nobody, registry(running=3)).page() == b""


async def test_pages_together_have_a_limit(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_PAGES_BYTES", 10)
    before = missing("no_room")
    assert await text(town.fleet.members) == ""
    assert missing("no_room") == before + 1


async def test_a_link_that_is_full_or_closed_costs_one_page(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy() -> bytes:
        raise WorkerBusyError("too much waits")

    before = missing("lost")
    link = town.fleet.link(WorkerId("w0"))
    monkeypatch.setattr(link, "figures", busy)
    assert await text(town.fleet.members) == ""
    assert missing("lost") == before + 1


async def test_a_frontend_that_keeps_asking_gets_one_answer_at_a_time(town: Town) -> None:
    """And reads none of them: nothing piles up."""
    service = town.worker.service
    (session,) = service._sessions.values()
    held, sent = asyncio.Event(), []

    async def send(to: Session, message: Figures) -> None:
        sent.append(message.number)
        await held.wait()

    desk = OwnMetrics(send, registry(running=1))
    telling = [asyncio.create_task(desk.tell(session, number)) for number in range(1000)]
    await until(lambda: sum(task.done() for task in telling) == 999)
    held.set()
    await asyncio.gather(*telling)
    assert len(sent) == 1 and not session.telling
    await desk.tell(session, 1000)
    assert sent[1:] == [1000]


async def test_a_page_is_made_once_for_all_who_ask_at_a_time() -> None:
    made = registry(running=1)
    desk = OwnMetrics(nobody, made)
    first = await desk.page()
    Gauge("later", "", registry=made)
    assert await desk.page() is first


async def test_who_asks_without_a_session_is_told_so(town: Town) -> None:
    link = town.fleet.link(WorkerId("w0"))
    (session,) = town.worker.service._sessions.values()
    await town.worker.service._end_session(session)
    await link._send(AskFigures(1))
    assert "no session for this frontend" in str(await link.lost())


async def test_a_worker_that_left_is_shown_no_more(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "SHOWN_S", 0.0)
    DECISIONS.labels("w0", "for the test").inc()
    labels = {"worker_id": "w0", "rank": "0"}
    (member,) = town.fleet.members.shown()
    await until(lambda: member.status is not None)
    assert REGISTRY.get_sample_value("mmrouter_rank_running", labels) == 0
    town.news.say(gone(town.card()))
    await town.worker.close()
    decisions = {"worker_id": "w0", "reason": "for the test"}
    await until(lambda: not town.fleet.members.names)
    assert REGISTRY.get_sample_value("mmrouter_rank_running", labels) is None
    await until(lambda: REGISTRY.get_sample_value("mmrouter_decisions_total", decisions) is None)


async def test_one_that_comes_back_keeps_its_figures(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    DECISIONS.labels("w0", "for the test").inc()
    decisions = {"worker_id": "w0", "reason": "for the test"}
    town.fleet._serving._show_no_more(WorkerId("w0"))
    assert REGISTRY.get_sample_value("mmrouter_decisions_total", decisions) is not None
    DECISIONS.remove("w0", "for the test")

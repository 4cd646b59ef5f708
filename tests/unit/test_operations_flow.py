"""Operations over real sockets, from an admin's HTTP request to a scripted engine and back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.sampling_params import SamplingParams

from common.discovery.base import CardPresent
from common.errors import NoWorkerError, WorkerStalledError
from common.identity import MmHash, RequestId, WorkerId
from common.request_plane.card import WorkerCard
from common.request_plane.operations import Condition, Operation, ResetMmCache, Sleep
from common.request_plane.protocol import Failed, FailureKind, Operate, Submit
from frontend.asgi import Door
from frontend.http.access.admin import AdminGuard
from frontend.http.access.api_keys import Keys
from frontend.http.operator.manage import Management, manage_routes
from frontend.http.operator.operate import Operating, operate_routes, vllms_routes
from tests.fakes.engine import never
from tests.fakes.fleet import Town, Worker, gone
from tests.fakes.routing import prompt, request
from tests.waiting import until

W0, W1 = WorkerId("w0"), WorkerId("w1")
ADMIN = {"Authorization": "Bearer admin"}


class Office:
    """A town with two workers, and the HTTP routes that operate them."""

    def __init__(self, town: Town) -> None:
        self.town = town
        self.first = town.worker
        self.second = Worker("i1")
        town.workers.append(self.second)
        self.forgot = 0
        operating = Operating(town.fleet.members)
        app = FastAPI()
        app.include_router(operate_routes(operating, self._forget))
        app.include_router(manage_routes(Management(lambda: [town.router], None)))
        app.include_router(vllms_routes(operating))
        guard = AdminGuard(Keys(["user"]), Keys(["admin"]))
        transport = httpx.ASGITransport(Door(app, [guard]))
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://f", headers=ADMIN, timeout=120
        )

    async def _forget(self) -> None:
        self.forgot += 1

    def cards(self) -> list[WorkerCard]:
        return [self.first.card("w0"), self.second.card("w1")]

    async def open(self) -> None:
        for card in self.cards():
            self.town.news.say(CardPresent(card))
        await until(lambda: len(self.town.router.roster.workers) == 2)

    async def post(self, path: str, **more: Any) -> tuple[int, Any]:
        answer = await self.http.post(path, **more)
        return answer.status_code, answer.json()

    def resting(self) -> set[WorkerId]:
        return self.town.router.resting

    def routed(self) -> set[str]:
        found = set[str]()
        for number in range(8):
            one = request(prompt(number))
            found.add(self.town.router.route(one).worker_id)
            self.town.router.in_flight.finished(one.request_id)
        return found


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    town = Town()
    made = Office(town)
    await made.open()
    yield made
    await made.http.aclose()
    await town.close()


def outcomes(body: Any) -> dict[str, str]:
    return {one["worker_id"]: one["outcome"] for one in body["workers"]}


async def test_one_worker_sleeps_and_the_other_gets_all(office: Office) -> None:
    status, body = await office.post("/mmrouter/workers/w0/sleep?level=2")
    assert (status, body["operation"], outcomes(body)) == (200, "sleep", {"w0": "done"})
    assert body["workers"][0]["incarnation"] == "i0"
    assert office.first.engine.operations == [Sleep(2, "wait")]
    await until(lambda: office.resting() == {W0})
    assert office.routed() == {"w1"}
    await office.post("/mmrouter/workers/w1/pause")
    await until(lambda: office.resting() == {W0, W1})
    with pytest.raises(NoWorkerError, match="paused or asleep"):
        office.routed()
    assert (await office.post("/mmrouter/workers/w1/resume"))[0] == 200
    await until(lambda: office.resting() == {W0})
    # Level 2 keeps no weights: awake, it must read them before it serves.
    await office.post("/mmrouter/workers/w0/wake_up")
    assert office.first.service._operations.state.condition is Condition.ASLEEP
    assert (await office.post("/mmrouter/workers/w0/reload_weights"))[0] == 200
    await until(lambda: not office.resting())
    assert office.routed() == {"w0", "w1"}


async def test_all_sleep_and_wake_up(office: Office) -> None:
    status, body = await office.post("/mmrouter/workers/sleep?mode=abort")
    assert (status, outcomes(body)) == (200, {"w0": "done", "w1": "done"})
    assert office.second.engine.operations == [Sleep(1, "abort")]
    await until(lambda: office.resting() == {W0, W1})
    wake_up = "/mmrouter/workers/wake_up?tags=weights&tags=kv_cache"
    assert (await office.post(wake_up))[0] == 200
    await until(lambda: not office.resting())


async def test_the_frontend_forgets_media_with_all_workers(office: Office) -> None:
    assert (await office.post("/mmrouter/workers/w0/reset_mm_cache"))[0] == 200
    assert office.forgot == 0
    assert (await office.post("/mmrouter/workers/reset_mm_cache"))[0] == 200
    assert office.forgot == 1


async def test_the_profiler_is_where_vllms_benchmark_asks_for_it(office: Office) -> None:
    status, body = await office.post("/start_profile", json={"profile_prefix": "mine"})
    assert (status, outcomes(body)) == (200, {"w0": "done", "w1": "done"})
    assert (await office.post("/stop_profile"))[0] == 200


async def test_what_a_worker_held_is_forgotten_with_its_caches(office: Office) -> None:
    router = office.town.router
    router.media.acked(W0, [MmHash("a")])
    router.media.acked(W1, [MmHash("a")])
    await office.post("/mmrouter/workers/w0/reset_mm_cache")
    await until(lambda: not router.media.holds(W0, MmHash("a")))
    assert router.media.holds(W1, MmHash("a"))
    # Predictions go with the blocks.
    one = request(prompt(1))
    router.route(one)
    router.in_flight.finished(one.request_id, served=True)
    assert router.route(request(prompt(1))).overlap_blocks > 0
    await office.post("/mmrouter/workers/reset_prefix_cache")
    await until(lambda: router.route(request(prompt(1))).overlap_blocks == 0)


async def test_a_frontend_that_comes_later_learns_who_sleeps(office: Office) -> None:
    await office.post("/mmrouter/workers/w0/sleep")
    later = Town()
    try:
        for card in office.cards():
            later.news.say(CardPresent(card))
        await until(lambda: later.router.resting == {W0})
        await office.post("/mmrouter/workers/w0/wake_up")
        await until(lambda: not later.router.resting)
    finally:
        await later.close()


async def test_what_is_on_its_way_is_refused_and_may_go_elsewhere(office: Office) -> None:
    link = office.town.fleet.link(W0)
    await office.post("/mmrouter/workers/w0/pause?mode=keep")
    submit = Submit(RequestId("r"), [1, 2], SamplingParams(), [], [])
    async with aclosing(link.dispatch(submit, [])) as answers:
        last = [answer async for answer in answers][-1]
    assert isinstance(last, Failed)
    assert (last.kind, last.message) == (FailureKind.BUSY, "it is paused")


async def test_what_waits_in_a_queue_that_rests_may_go_elsewhere(office: Office) -> None:
    """vLLM's own pause waits for requests that hold blocks, and leaves the others in its queue."""
    link = office.town.fleet.link(W0)
    office.first.engine.script = never
    submit = Submit(RequestId("r"), [1, 2], SamplingParams(), [], [])
    async with aclosing(link.dispatch(submit, [])) as answers:
        waiting = asyncio.create_task(_all(answers))
        await until(lambda: office.first.engine.running == 1)
        await office.post("/mmrouter/workers/w0/pause?mode=wait")
        last = (await waiting)[-1]
    assert isinstance(last, Failed)
    assert (last.kind, last.message) == (FailureKind.BUSY, "it is paused")
    assert office.first.engine.running == 0


async def _all(answers: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in answers]


async def test_requests_that_stand_still_are_no_stall(office: Office) -> None:
    link = office.town.fleet.link(W0)
    link._stall_s = 2.5
    office.first.engine.script = never
    submit = Submit(RequestId("r"), [1, 2], SamplingParams(), [], [])
    answers = link.dispatch(submit, [])
    waiting = asyncio.create_task(anext(answers))
    await until(lambda: office.first.engine.running == 1)
    await office.post("/mmrouter/workers/w0/pause?mode=keep")
    await asyncio.sleep(4)  # more than a stall; the link must live, so nothing can be waited for
    assert not waiting.done() and not link._lost.done()
    await office.post("/mmrouter/workers/w0/resume")
    # From now on its silence counts again.
    await until(link._lost.done)
    await asyncio.gather(waiting, return_exceptions=True)
    await answers.aclose()


async def test_an_engine_that_hangs_under_a_pause_that_waits_is_a_stall(office: Office) -> None:
    async def operating(operation: Operation) -> None:
        await asyncio.Event().wait()

    link = office.town.fleet.link(W0)
    link._stall_s = 0.5
    office.first.engine.script = never
    office.first.engine.operating = operating
    submit = Submit(RequestId("r"), [1, 2], SamplingParams(), [], [])
    async with aclosing(link.dispatch(submit, [])) as answers:
        waiting = asyncio.create_task(_all(answers))
        await until(lambda: office.first.engine.running == 1)
        status, body = await office.post("/mmrouter/workers/w0/pause?mode=wait")
        assert (status, outcomes(body)) == (502, {"w0": "failed"})
        with pytest.raises(WorkerStalledError):
            await waiting


async def test_a_worker_that_never_answers_keeps_nobody(office: Office) -> None:
    async def operating(operation: Operation) -> None:
        await asyncio.Event().wait()

    office.first.engine.operating = operating
    status, body = await office.post("/mmrouter/workers/reset_encoder_cache?timeout_s=1")
    assert (status, outcomes(body)) == (502, {"w0": "failed", "w1": "done"})
    assert "did not answer in 1 s, and may still do it" in body["workers"][0]["message"]
    # It is still at it, and says so to the next; nothing waits at the frontend.
    status, body = await office.post("/mmrouter/workers/w0/resume")
    assert (status, body["workers"][0]["message"]) == (
        409, "it is busy with reset_encoder_cache: one operation at a time"
    )  # fmt: skip
    assert len(office.town.fleet.link(W0)._operations) == 0


async def test_a_worker_that_goes_away_in_the_middle(office: Office) -> None:
    begun = asyncio.Event()

    async def operating(operation: Operation) -> None:
        begun.set()
        await asyncio.Event().wait()

    office.first.engine.operating = operating
    asking = asyncio.create_task(office.post("/mmrouter/workers/pause"))
    await begun.wait()
    await office.first.close()
    status, body = await asking
    assert (status, outcomes(body)) == (502, {"w0": "failed", "w1": "done"})
    assert "it is unknown whether it was done" in body["workers"][0]["message"]


async def test_another_run_of_the_name_is_another_worker(office: Office) -> None:
    await office.post("/mmrouter/workers/w0/sleep")
    await until(lambda: office.resting() == {W0})
    old = office.first.card("w0")
    await office.first.close()
    office.town.news.say(gone(old))
    await until(lambda: W0 not in office.town.router.roster.workers)
    assert office.resting() == set()
    assert (await office.post("/mmrouter/workers/w0/wake_up"))[0] == 404
    successor = office.town.start("i2")
    office.town.news.say(CardPresent(successor.card("w0")))
    await until(lambda: W0 in office.town.router.roster.workers)
    assert office.routed() == {"w0", "w1"}
    status, body = await office.post("/mmrouter/workers/w0/reset_mm_cache")
    assert (status, body["workers"][0]["incarnation"]) == (200, "i2")
    assert office.first.engine.operations == [Sleep(1, "wait")]


async def test_two_operations_at_once_one_of_them_is_refused(office: Office) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def operating(operation: Operation) -> None:
        begun.set()
        await go_on.wait()

    office.first.engine.operating = operating
    first = asyncio.create_task(office.post("/mmrouter/workers/w0/reset_mm_cache"))
    await begun.wait()
    assert (await office.post("/mmrouter/workers/w0/sleep"))[0] == 409
    go_on.set()
    assert (await first)[0] == 200
    assert office.first.engine.operations == [ResetMmCache()]


async def test_who_leaves_in_the_middle_leaves_nothing_behind(office: Office) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def operating(operation: Operation) -> None:
        begun.set()
        await go_on.wait()

    office.first.engine.operating = operating
    asking = asyncio.create_task(office.post("/mmrouter/workers/w0/sleep"))
    await begun.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: len(office.town.fleet.link(W0)._operations) == 0)
    go_on.set()  # and the worker does what it began
    await until(lambda: office.first.engine.resting)
    await until(lambda: office.resting() == {W0})


async def test_a_link_takes_so_many_questions_and_no_more(office: Office) -> None:
    async def operating(operation: Operation) -> None:
        await asyncio.Event().wait()

    office.first.engine.operating = operating
    link = office.town.fleet.link(W0)
    sent: list[Operate] = []

    async def send(message: Operate, media: object = ()) -> None:
        sent.append(message)  # and no answer ever comes

    link._send = send  # type: ignore[assignment, method-assign]
    asking = [
        asyncio.create_task(office.post("/mmrouter/workers/w0/resume?timeout_s=20"))
        for _ in range(9)
    ]
    await until(lambda: any(one.done() for one in asking))
    (refused,) = [one.result() for one in asking if one.done()]
    assert refused[0] == 409 and "8 operations wait" in refused[1]["workers"][0]["message"]
    assert len(sent) == 8
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/mmrouter/workers/nobody/sleep", 404, "there is no worker 'nobody'"),
        ("/mmrouter/workers/w0/sleep?level=3", 422, "level"),
        ("/mmrouter/workers/w0/sleep?mode=now", 422, "mode"),
        ("/mmrouter/workers/w0/sleep?levle=1", 422, "there is no parameter 'levle'"),
        ("/mmrouter/workers/w0/resume?mode=wait", 422, "there is no parameter 'mode'"),
        ("/mmrouter/workers/start_profile?profile=x", 422, "there is no parameter 'profile'"),
        ("/mmrouter/workers/w0/sleep?timeout_s=0", 422, "timeout_s"),
        ("/mmrouter/workers/w0/sleep?timeout_s=nan", 422, "timeout_s"),
        ("/mmrouter/workers/w0/wake_up?tags=everything", 422, "tags"),
        ("/mmrouter/workers/w0/collective_rpc", 422, "drain"),
        ("/mmrouter/workers/shutdown", 404, ""),
        ("/collective_rpc", 501, "closed list"),
        ("/update_weights", 501, "reload_weights"),
        ("/adapters", 501, "/v1/load_lora_adapter"),
        ("/mmrouter/workers/w0/load_lora_adapter", 422, "Field required"),
    ],
)
async def test_what_is_refused(office: Office, path: str, status: int, words: str) -> None:
    answer = await office.http.post(path, headers=ADMIN)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text
    assert office.first.engine.operations == []


@pytest.mark.parametrize(
    "path", ["/mmrouter/workers/w0/sleep", "/mmrouter/workers/sleep", "/sleep"]
)
@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": ""},
        {"Authorization": "Bearer user"},
        # A page in an operator's browser has no key to send.
        {"Authorization": "", "Origin": "https://evil", "Content-Type": "text/plain"},
    ],
)
async def test_only_admins_may(office: Office, path: str, headers: dict[str, str]) -> None:
    answer = await office.http.post(path, headers=headers)
    assert answer.status_code in (401, 403)
    assert office.first.engine.operations == []


@pytest.mark.parametrize(
    "body",
    [
        '{"profile_prefix": "x\\n"}',
        '{"profile_prefix": "../../etc/x"}',
        '{"max_iterations": -1}',
        '{"sneaky": 1}',
        "[]",
    ],
)
async def test_a_profile_is_named_as_a_file_may_be(office: Office, body: str) -> None:
    for kind in ("application/json", "text/plain"):
        answer = await office.http.post(
            "/mmrouter/workers/start_profile", content=body, headers={"Content-Type": kind}
        )
        assert answer.status_code == 422
    assert office.first.engine.operations == []


async def test_no_worker_at_all() -> None:
    town = Town()
    try:
        office = Office(town)
        assert (await office.post("/mmrouter/workers/sleep"))[0] == 503
        await office.http.aclose()
    finally:
        await town.close()

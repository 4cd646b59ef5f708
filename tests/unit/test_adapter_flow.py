"""Adapters that are loaded while workers serve: routes, links and router, engines as scripted."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from common.discovery.base import CardPresent
from common.errors import NoWorkerError
from common.identity import WorkerId
from common.request_plane.card import Adapter
from common.request_plane.operations import Operation
from common.request_plane.protocol import HeldAdapter, Status
from common.request_plane.step_sums import RankStatus
from frontend.http.operator.operate import Operating, operate_routes
from frontend.http.operator.status import FleetStatus, status_routes
from frontend.http.operator.status import Status as FrontendStatus
from frontend.http.server.adapter_routes import adapter_routes
from frontend.router import LoraKey
from frontend.workers import Members
from tests.fakes.fleet import Town, Worker
from tests.fakes.routing import prompt, request
from tests.waiting import until

W0, W1 = WorkerId("w0"), WorkerId("w1")
POEM = {"lora_name": "poem", "lora_path": "/p"}
KEY = LoraKey("poem", "/p")


class Office:
    """Two workers and what tells them to load adapters."""

    def __init__(self) -> None:
        self.town = Town()
        self.first, self.second = self.town.worker, Worker("i1")
        self.town.workers.append(self.second)
        fleet = self.town.fleet
        operating = Operating(fleet.members)
        app = FastAPI()
        app.include_router(operate_routes(operating, self._forget_media))
        app.include_router(adapter_routes(operating, allowed=True))
        status = FleetStatus(FrontendStatus([fleet], self.town.media_sender), None)
        app.include_router(status_routes(status, several=False))
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://f", timeout=120)

    async def _forget_media(self) -> None:
        """There are none."""

    async def open(self, **changes: Any) -> None:
        for worker, name in ((self.first, "w0"), (self.second, "w1")):
            self.town.news.say(CardPresent(worker.card(name, **changes)))
        await until(lambda: len(self.town.router.roster.workers) == 2)

    def having(self) -> set[str]:
        """Workers that the router takes a request for the adapter to."""
        workers = self.town.router.roster.workers.values()
        return {one.worker_id for one in workers if KEY in one.adapters}

    def routed(self, seed: int) -> str:
        one = request(prompt(seed), lora=KEY)
        chosen = self.town.router.route(one).worker_id
        self.town.router.in_flight.finished(one.request_id)
        return chosen

    async def shown(self) -> dict[str, list[dict[str, Any]]]:
        views = (await self.http.get("/mmrouter/workers")).json()
        return {view["worker_id"]: view["adapters"] for view in views}


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    made = Office()
    yield made
    await made.http.aclose()
    await made.town.close()


async def test_one_worker_loads_it_and_gets_its_requests(office: Office) -> None:
    await office.open()
    with pytest.raises(NoWorkerError):
        office.routed(1)
    answer = await office.http.post("/mmrouter/workers/w1/load_lora_adapter", json=POEM)
    assert answer.status_code == 200, answer.text
    await until(lambda: office.having() == {"w1"})
    assert office.town.fleet.adapters.requests["poem"].lora_path == "/p"
    assert {office.routed(seed) for seed in range(8)} == {"w1"}
    shown = {"name": "poem", "path": "/p", "active": True}
    assert await office.shown() == {"w0": [], "w1": [shown]}
    answer = await office.http.post("/mmrouter/workers/w1/load_lora_adapter", json=POEM)
    assert answer.status_code == 409 and "already" in answer.text
    unload = {"lora_name": "poem"}
    await office.http.post("/mmrouter/workers/w1/unload_lora_adapter", json=unload)
    await until(lambda: not office.having() and not office.town.fleet.adapters.requests)


async def test_all_load_it_with_vllms_words(office: Office) -> None:
    await office.open()
    answer = await office.http.post("/v1/load_lora_adapter", json=POEM)
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'poem' added successfully."
    await until(lambda: office.having() == {"w0", "w1"})
    await office.http.post("/mmrouter/workers/w0/unload_lora_adapter", json={"lora_name": "poem"})
    answer = await office.http.post("/v1/unload_lora_adapter", json={"lora_name": "poem"})
    assert answer.status_code == 409
    assert "1 of 2 workers" in answer.json()["error"]["message"], "the other has done it"
    await until(lambda: not office.having())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_name": "demo", "lora_path": "/p"}, 400, "conflicts with a served base model."),
        (POEM | {"model": "demo"}, 200, "Success"),
        (POEM | {"base_model_name": "demo"}, 200, "Success"),  # as Kubernetes' LoRA syncer sends
        (POEM | {"model": "nobody"}, 404, "`nobody` does not exist"),
        ({"lora_name": "poem"}, 422, "lora_path"),
        ({"lora_naem": "x"}, 422, "lora_name"),
        (POEM | {"load_inplace": "yes"}, 422, "load_inplace"),
        ({"lora_name": "", "lora_path": "/p"}, 422, "lora_name"),
    ],
)
async def test_what_is_asked_for(
    office: Office, body: dict[str, object], status: int, words: str
) -> None:
    await office.open()
    answer = await office.http.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


async def test_what_all_refuse_is_answered_by_vllms_server_so(office: Office) -> None:
    await office.open()

    async def said(route: str, **body: str) -> tuple[int, str, str]:
        answer = await office.http.post(f"/v1/{route}", json=body)
        error = answer.json()["error"]
        return answer.status_code, error["type"], error["message"]

    assert await said("unload_lora_adapter", lora_name="poem") == (
        404, "NotFoundError", "The lora adapter 'poem' cannot be found.",
    )  # fmt: skip
    await office.http.post("/v1/load_lora_adapter", json=POEM)
    status, kind, message = await said("load_lora_adapter", **POEM)
    assert (status, kind) == (400, "InvalidUserInput")
    assert message.startswith("The lora adapter 'poem' has already been loaded. If you want to")

    async def missing(_: Operation) -> None:
        raise RuntimeError("Call failed: Loading lora ode failed: No adapter found for /o")

    for worker in (office.first, office.second):
        worker.engine.operating = missing
    assert await said("load_lora_adapter", lora_name="ode", lora_path="/o") == (
        404, "NotFoundError", "Loading lora ode failed: No adapter found for /o",
    )  # fmt: skip
    assert office.having() == {"w0", "w1"}


async def test_two_frontends_that_load_other_files_by_one_name(office: Office) -> None:
    """Each worker takes what it hears first, and the other frontend is told so by all it asks."""
    await office.open()
    other = POEM | {"lora_path": "/other"}
    await office.http.post("/mmrouter/workers/w1/load_lora_adapter", json=other)
    answer = await office.http.post("/v1/load_lora_adapter", json=POEM)
    assert answer.status_code == 409
    assert "1 of 2 workers have not done it: worker w1" in answer.json()["error"]["message"]
    await until(lambda: "poem" in office.town.fleet.adapters.requests)
    chosen = office.town.fleet.adapters.requests["poem"].lora_path
    having = {"/p": "w0", "/other": "w1"}[chosen]
    one = request(prompt(1), lora=LoraKey("poem", chosen))
    assert office.town.router.route(one).worker_id == having


async def test_without_the_variable_it_says_what_does_it() -> None:
    app = FastAPI()
    app.include_router(adapter_routes(Operating(Members()), allowed=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://f") as http:
        for name in ("load_lora_adapter", "unload_lora_adapter"):
            answer = await http.post(f"/v1/{name}", json=POEM)
            assert answer.status_code == 404
            assert f"POST /mmrouter/workers/{name}" in answer.json()["detail"]


async def test_where_it_is_active_it_is_cheaper(office: Office) -> None:
    both = [Adapter(name="poem", path="/p"), Adapter(name="story", path="/s")]
    await office.open(adapters=both)
    await until(lambda: office.having() == {"w0", "w1"})
    for worker, name in ((office.first, "story"), (office.second, "poem")):
        worker.engine.adapters.active = (name,)
        worker.service._tell_all()
    await until(lambda: office.town.router.roster.workers[W1].active_adapters == {"poem"})
    await until(lambda: office.town.router.roster.workers[W0].active_adapters == {"story"})
    assert {office.routed(seed) for seed in range(8)} == {"w1"}


async def test_who_connects_later_or_again_is_told(office: Office) -> None:
    await office.open()
    await office.http.post("/v1/load_lora_adapter", json=POEM)
    await until(lambda: office.having() == {"w0", "w1"})
    office.town.fleet.link(W0)._lose("for the test")
    await until(lambda: "w0" not in office.having())
    await until(lambda: office.having() == {"w0", "w1"})
    assert await office.shown() == {
        name: [{"name": "poem", "path": "/p", "active": True}] for name in ("w0", "w1")
    }


async def test_names_that_can_not_be_shown_end_the_link(office: Office) -> None:
    await office.open()
    link = office.town.fleet.link(W0)
    bad = [HeldAdapter("a\nb", "/p")]
    link._take_status(Status([RankStatus(0, 0, 0, 0.0, 0, 0, 0)], 0, adapters=bad))
    await until(lambda: link._lost.done())
    assert "can't be printed" in str(link._lost.result())
    assert not office.town.fleet.adapters.requests

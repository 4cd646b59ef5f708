"""What operators may do to workers."""

from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from common.errors import NoWorkerError
from common.identity import Incarnation, WorkerId
from frontend.asgi import Door
from frontend.http import AdminGuard, Management, manage_routes
from frontend.http.access.api_keys import Keys
from frontend.processes import Siblings
from frontend.router import Router
from frontend.router.settings import RouterSettings
from tests.fakes.routing import Clock, prompt, request, worker

A, B = WorkerId("a"), WorkerId("b")
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    made = Router(clock=Clock(), seed=1)
    for name in ("a", "b"):
        await made.roster.add(worker(name))
    yield made
    await made.close()


def taken(router: Router, times: int = 20) -> set[str]:
    """Who gets requests that share nothing."""
    workers = set[str]()
    for number in range(times):
        one = request(prompt(number))
        workers.add(router.route(one).worker_id)
        router.in_flight.finished(one.request_id)
    return workers


def client(management: Management) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(manage_routes(management))
    guarded = Door(app, [AdminGuard(None, Keys(["admin"]))])
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(guarded), base_url="http://f/mmrouter/workers"
    )


async def test_who_is_drained_gets_nothing_until_it_is_reinstated(router: Router) -> None:
    async with client(Management(lambda: [router], None)) as http:
        done = await http.post("/a/drain", headers=ADMIN)
        assert done.json() == {
            "worker_id": "a", "incarnation": "1", "action": "drain", "processes": 1
        }  # fmt: skip
        assert taken(router) == {"b"}
        await http.post("/b/drain", headers=ADMIN)
        with pytest.raises(NoWorkerError, match="drained"):
            taken(router)
        for name in ("a", "b"):
            assert (await http.post(f"/{name}/reinstate", headers=ADMIN)).status_code == 200
    assert taken(router) == {"a", "b"}
    assert router.drained == {}


async def test_a_request_that_it_has_goes_on(router: Router) -> None:
    running = request(prompt(1))
    where = router.route(running).worker_id
    router.drained[where] = Incarnation("1")
    assert len(router.in_flight) == 1
    router.in_flight.first_token(running.request_id)
    router.in_flight.finished(running.request_id, served=True)
    assert where not in taken(router)


async def test_another_run_of_the_same_name_serves(router: Router) -> None:
    router.drained[A] = Incarnation("1")
    await router.roster.remove(A)
    await router.roster.add(worker("a"))
    assert taken(router) == {"b"}  # it was away for a moment
    await router.roster.remove(A)
    await router.roster.add(worker("a", incarnation=Incarnation("2")))
    assert taken(router) == {"a", "b"}
    await router.roster.remove(A)
    router.drained[B] = Incarnation("1")
    assert router.drained == {B: "1"}


async def test_who_is_ejected_is_on_trial_later_and_may_be_reinstated(router: Router) -> None:
    async with client(Management(lambda: [router], None)) as http:
        await http.post("/a/eject", headers=ADMIN)
        assert router.ejection.circuit(A) == ("open", "an operator")
        assert taken(router) == {"b"}
        await http.post("/a/reinstate", headers=ADMIN)
    assert router.ejection.circuit(A) == ("closed", "")
    assert taken(router) == {"a", "b"}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/a/drain", {}, 403),
        ("/a/drain", {"Authorization": "Bearer user"}, 403),
        ("/nobody/drain", ADMIN, 404),
        ("/a/kill", ADMIN, 422),
        ("/a%2Fb/drain", ADMIN, 404),
    ],
)
async def test_what_is_not_done(
    router: Router, path: str, headers: dict[str, str], status: int
) -> None:
    async with client(Management(lambda: [router], None)) as http:
        assert (await http.post(path, headers=headers)).status_code == status
        assert (await http.get("/a/drain", headers=ADMIN)).status_code == 405
    assert taken(router) == {"a", "b"}


class Together:
    """Two processes that answer each other."""

    def __init__(self) -> None:
        self.tells: dict[str, Any] = {}
        self.other: Together | None = None

    def tell(self, topic: str, tell: Any) -> None:
        self.tells[topic] = tell

    async def ask(self, topic: str, argument: bytes = b"") -> dict[str, bytes]:
        assert self.other is not None
        return {"1": self.other.tells[topic](argument)}


async def test_all_processes_do_it_and_one_that_comes_later_learns_it(router: Router) -> None:
    ours, theirs = Together(), Together()
    ours.other, theirs.other = theirs, ours
    second = Router(RouterSettings(), clock=Clock())
    try:
        for name in ("a", "b"):
            await second.roster.add(worker(name))
        first = Management(lambda: [router], cast(Siblings, ours))
        Management(lambda: [second], cast(Siblings, theirs))
        assert (await first.act(A, cast(Any, "drain"))).processes == 2
        assert taken(second) == taken(router) == {"b"}
        late = Router(RouterSettings(), clock=Clock())
        await Management(lambda: [late], cast(Siblings, theirs)).learn()
        assert late.drained == {A: "1"}
        await first.act(B, cast(Any, "drain"))
        await Management(lambda: [late], cast(Siblings, theirs)).learn()  # which has no worker yet
        assert late.drained == {A: "1", B: "1"}
        await late.close()
    finally:
        await second.close()

"""Models come and go with their workers: real links and fleets, models that are made up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY

from common.discovery.base import CardPresent
from common.errors import ConfigurationError
from common.identity import Incarnation
from common.request_plane.card import WorkerCard
from common.transfer.arena import Arena
from common.transfer.codec import encode
from common.transfer.transports import TransferMode
from frontend.args import parse
from frontend.asgi import Door, Step, unanswered
from frontend.gate import BodyGate
from frontend.http import Admission, History, Management, PoolingLimits, ReadinessGate, operator_app
from frontend.http.settings import HttpSettings
from frontend.models import Model, Models, Shared, operator_routers
from frontend.router import Router, RouterSettings
from frontend.workers import Contract, Fleet, MediaSender, Refusals, follow
from frontend.workers import fleets as fleets_module
from tests.fakes.fleet import Announcements, Worker, gone
from tests.unit.common.transfer.items import image, image_hash
from tests.waiting import until


class Listed:
    """What vLLM's server would list."""

    def __init__(self, name: str) -> None:
        self.base_model_paths = [SimpleNamespace(name=name)]
        self._name = name

    async def show_available_models(self) -> Any:
        cards = [
            {"id": self._name, "parent": None},
            {"id": "beta", "parent": self._name},
            {"id": f"of-{self._name}", "parent": self._name},
        ]
        return SimpleNamespace(model_dump=lambda: {"object": "list", "data": cards})


@dataclass
class Loads:
    """Loads models as a test says.

    Attributes:
        may_end: while it is cleared, loading goes on.
        asked: names of models, in the order in which they were loaded.
        closed: names of those that were closed.
        at_once: how many were being loaded at the same time.
    """

    may_end: asyncio.Event
    asked: list[str]
    closed: list[str]
    error: Exception | None = None
    at_once: int = 0
    loading: int = 0
    answer: asyncio.Event | None = None
    text_only: bool = False

    async def load(
        self,
        card: WorkerCard,
        fleet: Fleet,
        shared: Shared,
        closing: AsyncExitStack,
        serve: Any,
    ) -> Model:
        name = card.served_model_names[0]
        self.asked.append(name)
        closing.callback(self.closed.append, name)
        assert serve is not shared.args.serve, "it is filled in"
        self.loading += 1
        self.at_once = max(self.at_once, self.loading)
        try:
            await self.may_end.wait()
        finally:
            self.loading -= 1
        if self.error is not None:
            raise self.error
        app = FastAPI()
        app.state.openai_serving_models = Listed(name)

        async def say() -> dict[str, str]:
            if self.answer is not None:
                await self.answer.wait()
            return {"model": name}

        app.add_api_route("/v1/completions", say, methods=["POST"])
        preprocessor: Any = SimpleNamespace(defers=False, takes_text_only=self.text_only)
        client: Any = SimpleNamespace()
        return Model(preprocessor, client, app)


class Frontend:
    """Models of which only the loading is made up."""

    def __init__(self, *flags: str) -> None:
        self.news = Announcements()
        self.arena = Arena(1 << 20, prefault=False)
        self.media_sender = MediaSender(self.arena, TransferMode.AUTO)

        def make(refusals: Refusals) -> Fleet:
            return Fleet(
                Router(RouterSettings()),
                self.media_sender,
                Incarnation("f"),
                "0.32.0",
                refusals=refusals,
            )

        args = parse(list(flags))
        self.models = Models(make, Contract("0.32.0"), args.models, root_path="")
        fleets = self.models.fleets
        history, management = History(), Management(lambda: (), None)
        routers = operator_routers(
            fleets, self.media_sender, None, history, self.models.forget_media, management, "kv"
        )
        self.gate = ReadinessGate(fleets.check_available, operator_app(routers, ""))
        server: Any = SimpleNamespace(accept=lambda: None)
        self.expected: list[str] = []
        loader: Any = SimpleNamespace(expect_no_media=lambda: self.expected.append("no media"))
        pooling = PoolingLimits(args.http, several_keys=False)
        shared = Shared(
            args,
            fleets,
            routers,
            management,
            self.media_sender,
            loader,
            server,
            None,
            pooling,
            history,
        )
        self.opening = asyncio.create_task(self.models.open(shared, self.gate))
        self.following = asyncio.create_task(follow(self.news, self.models.fleets.apply))
        self.workers: list[Worker] = []

    def come(self, model: str, **changes: Any) -> WorkerCard:
        """A worker of a model comes."""
        worker = Worker(f"i{len(self.workers)}")
        self.workers.append(worker)
        settings = {"model": f"/models/{model}"}
        names = [model]
        card = worker.card(
            f"w{len(self.workers)}", model=settings, served_model_names=names, **changes
        )
        self.news.say(CardPresent(card))
        return card

    async def leave(self, card: WorkerCard) -> None:
        await self.workers[int(card.incarnation.removeprefix("i"))].close()
        self.news.say(gone(card))

    async def ask(self, model: str) -> httpx.Response:
        async with self.http() as http:
            return await http.post("/v1/completions", json={"model": model})

    async def listed(self) -> list[str]:
        async with self.http() as http:
            answer = await http.get("/v1/models")
            return [card["id"] for card in answer.json()["data"]]

    def http(self) -> httpx.AsyncClient:
        steps: list[Step] = [self.gate, Admission(HttpSettings()), BodyGate(max_choices=1)]
        transport = httpx.ASGITransport(Door(unanswered, steps))
        return httpx.AsyncClient(transport=transport, base_url="http://f")

    def serving(self) -> list[str]:
        return [app.names[0] for app in self.models.choice.apps]

    async def close(self) -> None:
        self.following.cancel()
        self.opening.cancel()
        await asyncio.gather(self.following, self.opening, return_exceptions=True)
        await self.models.close()
        for worker in self.workers:
            await worker.close()
        self.media_sender.close()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    made = Loads(asyncio.Event(), [], [])
    made.may_end.set()
    monkeypatch.setattr(Model, "load", made.load)
    return made


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    frontend = Frontend("--models-from-cards", "--max-models=2")
    yield frontend
    await frontend.close()


@pytest.fixture
async def single() -> AsyncIterator[Frontend]:
    frontend = Frontend()
    yield frontend
    await frontend.close()


def figures(model: str) -> list[float | None]:
    return [
        REGISTRY.get_sample_value(f"mmrouter_model_{name}", {"model": model})
        for name in ("serving", "workers", "requests")
    ]


async def test_models_are_served_while_they_have_workers(loads: Loads, frontend: Frontend) -> None:
    assert (await frontend.ask("alpha")).status_code == 503
    alpha = frontend.come("alpha")
    await until(lambda: frontend.serving() == ["alpha"])
    beta = frontend.come("beta")
    await until(lambda: len(frontend.serving()) == 2)
    assert (await frontend.ask("beta")).json() == {"model": "beta"}
    # A model goes before an adapter of its name, and of equal names the first counts.
    assert await frontend.listed() == ["alpha", "beta", "of-alpha", "of-beta"]
    await until(lambda: figures("alpha") == [1, 1, 0])
    await frontend.leave(alpha)
    await until(lambda: loads.closed == ["alpha"])
    assert figures("alpha") == [None, None, None]
    assert await frontend.listed() == ["beta", "of-beta"]
    await frontend.leave(beta)
    await until(lambda: loads.closed == ["alpha", "beta"])
    answer = await frontend.ask("beta")
    assert answer.status_code == 503 and "all are gone" in answer.text
    frontend.come("beta")
    await until(lambda: frontend.serving() == ["beta"])
    assert (await frontend.ask("beta")).json() == {"model": "beta"}


async def test_operators_are_answered_while_nobody_is_there(frontend: Frontend) -> None:
    async with frontend.http() as http:
        operators = "/mmrouter/workers", "/mmrouter/history"
        for path in ("/livez", "/metrics", "/status", "/version", *operators):
            assert (await http.get(path)).status_code == 200, path
        for path in ("/health", "/v1/models", "/metricsx", "/mmrouters"):
            answer = await http.get(path)
            assert answer.status_code == 503, path
            assert "none has registered yet" in answer.json()["error"]["message"]
        assert "mmrouter_workers" in (await http.get("/metrics")).text
        unknown = await http.post("/mmrouter/workers/w0/drain")
        assert unknown.status_code == 404
        assert "there is no worker 'w0'" in unknown.json()["error"]["message"]


async def test_the_frontend_says_what_it_is(frontend: Frontend) -> None:
    async with frontend.http() as http:
        said, later = [(await http.get("/mmrouter/summary")).json() for _ in range(2)]
    assert (said["models"], said["mode"], said["processes"]) == ([], "kv", 1)
    assert "vLLM" in said["version"] and said["host"]
    assert said["started"] == later["started"] <= said["now"] <= later["now"]


async def test_a_worker_that_has_left_stays_among_workers_and_events(
    loads: Loads, frontend: Frontend
) -> None:
    card = frontend.come("alpha")
    await until(lambda: figures("alpha") == [1, 1, 0])
    await frontend.leave(card)
    await until(lambda: loads.closed == ["alpha"])
    async with frontend.http() as http:
        (gone,) = (await http.get("/mmrouter/workers")).json()
        assert (gone["worker_id"], gone["model"], gone["state"]) == (
            card.worker_id,
            "alpha",
            "left",
        )
        assert gone["gone_at"] and gone["gone_reason"] == "it is shutting down"
        events = (await http.get("/mmrouter/events")).json()
        assert (await http.get("/mmrouter/events?last=1")).json() == events[:1]
    mine = [each for each in events if each["worker_id"] == card.worker_id]
    assert {"joined", "removed"} <= {each["what"] for each in mine}
    assert [each["at"] for each in events] == sorted((each["at"] for each in events), reverse=True)


async def test_one_is_loaded_after_the_other_and_keeps_nobody_waiting(
    loads: Loads, frontend: Frontend
) -> None:
    frontend.come("alpha")
    await until(lambda: frontend.serving() == ["alpha"])
    loads.may_end.clear()
    frontend.come("beta")
    await until(lambda: loads.loading)
    answer = await frontend.ask("beta")
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert "`beta` is being loaded" in answer.json()["error"]["message"]
    assert (await frontend.ask("alpha")).json() == {"model": "alpha"}
    assert figures("beta")[0] == 0
    loads.may_end.set()
    await until(lambda: frontend.serving() == ["alpha", "beta"])
    assert loads.at_once == 1


@pytest.mark.parametrize("error", [ConfigurationError("no such file"), KeyError("parser")])
async def test_a_model_that_can_not_be_loaded_is_refused_and_keeps_no_place(
    loads: Loads, frontend: Frontend, error: Exception
) -> None:
    loads.error = error
    card = frontend.come("alpha")
    refusals = frontend.models.fleets.refusals
    await until(lambda: card.worker_id in refusals.by_worker() and loads.closed)
    await until(lambda: not list(frontend.models.fleets))
    assert str(error) in refusals.by_worker()[card.worker_id]
    answer = await frontend.ask("alpha")
    assert answer.status_code == 503 and "1 refused" in answer.json()["error"]["message"]
    async with frontend.http() as http:
        (refused,) = (await http.get("/mmrouter/workers/refused")).json()
    assert refused["worker_id"] == card.worker_id and str(error) in refused["reason"]
    frontend.news.say(CardPresent(card))
    loads.error = None
    for name in ("beta", "gamma"):  # both places are free
        frontend.come(name)
        await until(lambda name=name: name in frontend.serving())  # type: ignore[misc]
    assert loads.asked == ["alpha", "beta", "gamma"]


async def test_a_path_that_is_none_is_refused(frontend: Frontend) -> None:
    """With vLLM's own loading."""
    card = frontend.come("alpha")
    refusals = frontend.models.fleets.refusals
    await until(lambda: card.worker_id in refusals.by_worker())
    assert "can't be read on this machine" in refusals.by_worker()[card.worker_id]
    await until(lambda: not list(frontend.models.fleets))


async def test_workers_that_leave_while_their_model_is_loaded(
    loads: Loads, frontend: Frontend
) -> None:
    loads.may_end.clear()
    alpha, beta = frontend.come("alpha"), frontend.come("beta")
    await until(lambda: loads.loading)
    await frontend.leave(alpha)
    await frontend.leave(beta)  # which waits for its turn
    await until(lambda: not list(frontend.models.fleets))
    loads.may_end.set()
    await until(lambda: loads.closed == ["alpha"])
    assert loads.asked == ["alpha"] and not frontend.serving()
    frontend.come("beta")
    await until(lambda: frontend.serving() == ["beta"])


async def test_requests_that_run_end_before_their_model_is_closed(
    loads: Loads, frontend: Frontend
) -> None:
    alpha = frontend.come("alpha")
    frontend.come("beta")
    await until(lambda: len(frontend.serving()) == 2)
    loads.answer = asyncio.Event()
    asking = asyncio.create_task(frontend.ask("alpha"))
    await until(lambda: figures("alpha")[2] == 1)
    await frontend.leave(alpha)
    await until(lambda: frontend.serving() == ["beta"])
    assert not loads.closed
    loads.answer.set()
    assert (await asking).json() == {"model": "alpha"}
    await until(lambda: loads.closed == ["alpha"])


async def test_media_of_a_model_that_left_are_processed_anew(
    loads: Loads, frontend: Frontend
) -> None:
    """Another model may have its path, and settings with which they become other tensors."""
    alpha = frontend.come("alpha")
    await until(lambda: frontend.serving() == ["alpha"])
    frontend.arena.put(image_hash(1), encode(image(1))).release()
    await frontend.leave(alpha)
    await until(lambda: loads.closed == ["alpha"])
    await until(lambda: not frontend.arena.contains(image_hash(1)))


async def test_it_ends_while_a_model_is_loaded(loads: Loads, frontend: Frontend) -> None:
    loads.may_end.clear()
    frontend.come("alpha")
    await until(lambda: loads.loading)
    await frontend.close()
    assert loads.closed == ["alpha"]


async def test_a_single_model_stays_and_refuses_the_workers_of_others(
    loads: Loads, single: Frontend
) -> None:
    alpha = single.come("alpha")
    await single.opening
    other = single.come("beta")
    refusals = single.models.fleets.refusals
    await until(lambda: other.worker_id in refusals.by_worker())
    assert "served_model_names" in refusals.by_worker()[other.worker_id]
    # Its app says what other names are; the one here does not look at them.
    assert (await single.ask("whatever")).json() == {"model": "alpha"}
    await until(lambda: figures("alpha") == [1, 1, 0])
    await single.leave(alpha)
    await until(lambda: figures("alpha") == [1, 0, 0])
    single.come("alpha")
    await until(lambda: figures("alpha") == [1, 1, 0])
    assert loads.asked == ["alpha"] and not loads.closed
    await single.close()
    assert loads.closed == ["alpha"]
    assert (await single.ask("alpha")).status_code == 503


@pytest.mark.parametrize("text_only", [True, False])
async def test_what_decodes_media_is_freed_where_a_model_takes_none(
    loads: Loads, single: Frontend, text_only: bool
) -> None:
    loads.text_only = text_only
    single.come("alpha")
    await until(lambda: single.serving() == ["alpha"])
    assert single.expected == ["no media"] * text_only


@pytest.mark.parametrize(
    "error", [ConfigurationError("no such file"), KeyError("parser"), ZeroDivisionError("by zero")]
)
async def test_a_single_model_that_can_not_be_loaded_is_refused_and_another_one_served(
    loads: Loads, single: Frontend, error: Exception
) -> None:
    """One worker with a broken model ended the whole frontend."""
    loads.error = error
    cards = [single.come("alpha"), single.come("alpha")]
    refusals = single.models.fleets.refusals
    await until(lambda: len(refusals.by_worker()) == 2 and not list(single.models.fleets))
    for card in cards:
        assert str(error) in refusals.by_worker()[card.worker_id]
    cards.append(single.come("alpha"))
    await until(lambda: len(refusals.by_worker()) == 3)
    loads.error = None
    single.come("beta")
    await until(lambda: single.serving() == ["beta"])
    assert (await single.ask("beta")).json() == {"model": "beta"}
    assert loads.asked == ["alpha", "beta"], "not again for each worker"
    await single.opening


async def test_a_model_that_could_not_be_loaded_is_tried_again(
    loads: Loads, frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets_module, "RETRY_S", 0.01)
    loads.error = ConfigurationError("no such file")
    frontend.come("alpha")
    await until(lambda: len(loads.asked) > 2)
    loads.error = None
    await until(lambda: frontend.serving() == ["alpha"])
    assert not frontend.models.fleets.refusals.by_worker()
    assert (await frontend.ask("alpha")).json() == {"model": "alpha"}


async def test_a_single_model_is_loaded_once_though_its_workers_leave_meanwhile(
    loads: Loads, single: Frontend
) -> None:
    loads.may_end.clear()
    alpha = single.come("alpha")
    await until(lambda: loads.loading)
    await single.leave(alpha)
    loads.may_end.set()
    await until(lambda: single.serving() == ["alpha"])
    await single.opening
    assert loads.asked == ["alpha"]

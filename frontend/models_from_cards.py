"""As many models as the fleet has (``--models-from-cards``): each is loaded when its first worker
comes, and let go when its last worker has left.
"""

import asyncio
import copy
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from fastapi import FastAPI
from starlette.routing import Match

from common.aio.supervised import once
from common.errors import MmRouterError
from common.observability.live_metrics import Row
from common.observability.still_busy import still_busy
from common.observability.telemetry import MODEL_LOADS, MODELS
from frontend.asgi import App, Scope
from frontend.http import ModelApp, ModelChoice, ReadinessGate, list_together
from frontend.model import Model, Shared, Whole
from frontend.workers import Contract, Everybody, Fleet, Fleets, Gauges

logger = logging.getLogger(__name__)

Part = TypeVar("Part")

LAST_WORDS_S = 30.0
"""How long requests may take to end once the last worker of their model has left. All that needed
one have failed by then."""


class ModelsFromCards:
    """Loads models and lets them go.

    Attributes:
        fleets: of all models.
    """

    def __init__(
        self,
        make_fleet: Callable[[], Fleet],
        terms: Contract,
        gauges: Gauges,
        *,
        most: int,
        root_path: str,
    ) -> None:
        """
        Args:
            make_fleet: for another model.
            terms: what is demanded of every card.
            most: models at the same time.
            root_path: prefix under which a proxy serves the app.
        """
        self.fleets = Fleets(make_fleet, self._came, terms, most=most, gauges=gauges)
        self.choice = ModelChoice(lambda name: self.fleets.of(name) is not None, root_path)
        self._whole = Whole(
            self.fleets,
            _OfEach(self.fleets, lambda fleet: fleet.router),
            Everybody(_OfEach(self.fleets, lambda fleet: fleet.members)),
            (self.fleets.refusals,),
            self._forget_media,
        )
        self._models: dict[ModelApp, Model] = {}
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()
        MODELS.set_function(self._rows)

    def open(self, shared: Shared, gate: ReadinessGate, served: Callable[[App], App]) -> None:
        """Serve what has come, and what comes.

        Args:
            served: what requests go to, with an app inside.
        """
        self._shared = shared
        self._gate = gate
        self._served = served(self.choice)
        self._ready.set()

    async def close(self) -> None:
        """Leave every worker and let all models go."""
        await self.fleets.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _came(self, fleet: Fleet, gone: asyncio.Event) -> None:
        task = asyncio.create_task(self._serve(fleet, gone), name=f"model {fleet.names[0]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, fleet: Fleet, gone: asyncio.Event) -> None:
        """All the life of a model."""
        closing = AsyncExitStack()
        live = partial(self._live, fleet, gone, closing)
        try:
            await once("model", live, lambda error: self._refuse(fleet, error))
            await gone.wait()  # if it could not be served, once its workers are
        finally:
            # Goes on if this is cancelled meanwhile.
            task = asyncio.create_task(self._let_go(fleet, closing), name="model leaves")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            await asyncio.shield(task)

    async def _let_go(self, fleet: Fleet, closing: AsyncExitStack) -> None:
        await fleet.close()
        await once("model leaves", closing.aclose, lambda _: None)
        await fleet.router.close()
        self.fleets.closed(fleet)
        logger.info("model %s is let go", fleet.names[0])

    async def _live(self, fleet: Fleet, gone: asyncio.Event, closing: AsyncExitStack) -> None:
        try:
            closing.callback(gc.unfreeze)  # vLLM freezes at each start what is there
            model = await self._load(fleet, gone, closing)
            if model is None:
                return
            MODEL_LOADS.labels("ok").inc()
            with self._let_in(fleet, model) as app:
                logger.info("serving %s", ", ".join(fleet.names))
                await gone.wait()
            await fleet.close()
            await _ended(app)
        except MmRouterError as error:
            logger.error("model %s can't be served: %s", fleet.names[0], error)
            self._refuse(fleet, error)

    def _refuse(self, fleet: Fleet, error: BaseException) -> None:
        MODEL_LOADS.labels(type(error).__name__).inc()
        self.fleets.give_up(fleet, error)

    async def _load(
        self, fleet: Fleet, gone: asyncio.Event, closing: AsyncExitStack
    ) -> Model | None:
        """One at a time, since it takes a core for seconds. None if its workers did not wait."""
        await self._ready.wait()
        async with self._turn:
            if gone.is_set():
                return None
            card = await fleet.contract.card()
            with still_busy(f"loading the processor of {card.model.model}", logger.info):
                serve = copy.copy(self._shared.args.serve)
                model = await Model.load(
                    card, fleet, self._shared, self._whole, closing, serve, apart=True
                )
            list_together(model.app, lambda: [each.app for each in self._models.values()])
            await closing.enter_async_context(model.app.router.lifespan_context(model.app))
        return None if gone.is_set() else model

    @contextmanager
    def _let_in(self, fleet: Fleet, model: Model) -> Iterator[ModelApp]:
        app = ModelApp(
            fleet.names,
            fleet.adapters.requests,
            model.app,
            lambda: fleet.connected,
            model.preprocessor.defers,
            partial(_has_route, model.app),
        )
        self._models[app] = model
        self.choice.apps.append(app)
        self._gate.let_in(self._served)
        self._shared.server.accept()
        try:
            yield app
        finally:
            del self._models[app]
            self.choice.apps.remove(app)
            if not self.choice.apps:
                self._gate.let_in(None)

    async def _forget_media(self) -> None:
        for model in list(self._models.values()):
            await model.client.reset_mm_cache()

    def _rows(self) -> Iterator[Row]:
        for fleet in self.fleets:
            app = next((app for app in self.choice.apps if app.names == fleet.names), None)
            workers = sum(1 for _ in fleet.members.available())
            figures = (app is not None, workers, 0 if app is None else app.requests)
            yield Row((fleet.names[0],), figures)


def _has_route(app: FastAPI, scope: Scope) -> bool:
    return any(route.matches(scope)[0] is not Match.NONE for route in app.routes)


async def _ended(app: ModelApp) -> None:
    """Wait for its requests, but not for ever: then they fail with what they miss."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            while app.requests:
                await app.idle.wait()
    except TimeoutError:
        logger.warning("%d requests of model %s are given up", app.requests, app.names[0])


@dataclass(frozen=True)
class _OfEach(Generic[Part]):
    """A part of every fleet, asked each time."""

    fleets: Fleets
    part: Callable[[Fleet], Part]

    def __iter__(self) -> Iterator[Part]:
        return map(self.part, self.fleets)

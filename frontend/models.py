"""The models of a frontend: each is loaded when its first worker joins.

With ``--models-from-cards`` every model of the fleet is served, and unloaded when its last worker
leaves. Otherwise the first worker decides on the one model, which stays.
"""

import asyncio
import copy
import gc
import logging
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

from fastapi import APIRouter, FastAPI
from starlette.routing import Match

from common.aio.processes import freeze_heap
from common.aio.supervised import once, stop_tasks
from common.errors import ConfigurationError, MmRouterError
from common.observability.live_metrics import Row
from common.observability.log_lines import log_progress
from common.observability.telemetry import MODEL_LOADS, MODELS
from common.request_plane.card import WorkerCard
from common.transfer.arena import Arena
from common.transfer.transports import TransferMode
from frontend.args import FrontendArgs, ModelsSettings
from frontend.asgi import Receive, Scope, Send
from frontend.fetch import MediaLoader
from frontend.http import (
    FleetStatus,
    History,
    Management,
    ModelApp,
    ModelChoice,
    Operating,
    PoolingLimits,
    ReadinessGate,
    Server,
    Status,
    build_vllm_app,
    describe_aside,
    history_routes,
    limit_pooling,
    limit_speech,
    list_together,
    live_routes,
    manage_routes,
    operate_routes,
    page_routes,
    prompt_speech_aside,
    replace_engine_routes,
    share_adapters,
    status_routes,
    tokenize_decisions_aside,
    tokenize_scores_aside,
    worker_metrics_routes,
    write_tokens_aside,
)
from frontend.processes import Siblings
from frontend.processing import Preprocessor
from frontend.request import RequestRunner, RoutedEngineClient
from frontend.workers import Contract, Fleet, Fleets, MediaSender, Refusals

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shared:
    args: FrontendArgs
    fleets: Fleets
    operator_routers: list[APIRouter]
    management: Management
    media_sender: MediaSender
    loader: MediaLoader
    server: Server
    siblings: Siblings | None
    pooling: PoolingLimits
    history: History


@dataclass(frozen=True)
class Model:
    """A loaded model. The lifespan of vLLM's app still has to be entered."""

    preprocessor: Preprocessor
    client: RoutedEngineClient
    app: FastAPI

    @classmethod
    async def load(
        cls,
        card: WorkerCard,
        fleet: Fleet,
        shared: Shared,
        closing: AsyncExitStack,
        serve: Namespace,
    ) -> Self:
        """Load a model. Slow (seconds), mostly in threads. Fills its arguments into ``serve``.

        Raises:
            ConfigurationError: this frontend can't serve it.
            Exception: vLLM's, for arguments that don't fit it.
        """
        preprocessor = await asyncio.to_thread(_preprocessor, card, serve, shared)
        closing.push_async_callback(preprocessor.close)
        client = _client(preprocessor, fleet, shared)
        tasks = preprocessor.tasks
        app = await build_vllm_app(client, serve, tasks, shared.server)
        limit_pooling(app, shared.pooling, preprocessor.tokenizing)
        limit_speech(app, shared.loader)
        prompt_speech_aside(app, preprocessor.tokenizing)
        tokenize_decisions_aside(app, preprocessor.tokenizing)
        tokenize_scores_aside(app, preprocessor.tokenizing, shared.pooling.check_tokens)
        write_tokens_aside(app)
        describe_aside(app)
        share_adapters(app, fleet.adapters)
        await _add_routes(app, shared)
        preprocessor.hf_runs.reset()
        return cls(preprocessor, client, app)


def _preprocessor(card: WorkerCard, serve: Namespace, shared: Shared) -> Preprocessor:
    return Preprocessor(
        card,
        serve,
        loader=shared.loader,
        arena=shared.media_sender.arena,
        settings=shared.args.preprocess,
        keep_sources=shared.args.transfer is TransferMode.DISABLED,
    )


def _client(preprocessor: Preprocessor, fleet: Fleet, shared: Shared) -> RoutedEngineClient:
    runner = RequestRunner(
        preprocessor,
        fleet,
        fleet.router,
        shared.media_sender,
        shared.args.faults,
        model=preprocessor.card.served_model_names[0],
    )
    most_calls = shared.args.http.max_inflight
    return RoutedEngineClient(
        preprocessor, fleet, fleet.router, runner, most_calls, shared.siblings
    )


def operator_routers(
    fleets: Fleets,
    media_sender: MediaSender,
    siblings: Siblings | None,
    history: History,
    forget_media: Callable[[], Awaitable[None]],
    management: Management,
    mode: str = "",
) -> list[APIRouter]:
    """Return the operators' routes, which all models share."""
    own = Status(fleets, media_sender, fleets.refusals, mode, fleets.departures)
    status = FleetStatus(own, siblings)
    history.share(siblings)
    return [
        live_routes(),
        page_routes(),
        status_routes(status, several=siblings is not None),
        history_routes(history),
        worker_metrics_routes(fleets),
        operate_routes(Operating(fleets), forget_media),
        manage_routes(management),
    ]


async def _add_routes(app: FastAPI, shared: Shared) -> None:
    for router in shared.operator_routers:
        app.include_router(router)
    replace_engine_routes(app, Operating(shared.fleets))
    await shared.management.learn()


LAST_WORDS_S = 30.0
"""Seconds that running requests may take after the last worker of their model left. Requests that
needed a worker have failed by then."""

_LOADING_ERRORS = (ImportError, KeyError, OSError, TypeError, ValueError)
"""Raised by vLLM for wrong flags and for files that this host lacks."""


class Models:
    """Load and unload models; ``choice`` picks the model of a request."""

    def __init__(
        self,
        make_fleet: Callable[[Refusals], Fleet],
        terms: Contract,
        settings: ModelsSettings,
        *,
        root_path: str,
    ) -> None:
        self._several = settings.models_from_cards
        most = settings.max_models if self._several else None
        self.fleets = Fleets(make_fleet, self._came, terms, most=most)
        self.choice = ModelChoice(lambda name: self.fleets.of(name) is not None, root_path)
        self._models: dict[ModelApp, Model] = {}
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()
        self._come = asyncio.Event()
        MODELS.set_function(self._rows)

    async def open(self, shared: Shared, gate: ReadinessGate) -> None:
        """Start to load models. Without ``--models-from-cards`` wait for the first worker."""
        self._shared = shared
        self._gate = gate
        self._ready.set()
        if not self._several:
            place = shared.args.discovery
            with log_progress(f"waiting for the first usable worker in {place}", logger.info):
                await self._come.wait()

    async def forget_media(self) -> None:
        for model in list(self._models.values()):
            await model.client.reset_mm_cache()

    async def close(self) -> None:
        await self.fleets.close()
        await stop_tasks(self._tasks)
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _came(self, fleet: Fleet, gone: asyncio.Event) -> None:
        self._come.set()
        task = asyncio.create_task(self._serve(fleet, gone), name=f"model {fleet.names[0]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, fleet: Fleet, gone: asyncio.Event) -> None:
        closing = AsyncExitStack()
        live = partial(self._live, fleet, gone, closing)
        try:
            await once("model", live, lambda error: self._refuse(fleet, error))
            await gone.wait()  # keep a model that failed to load until its workers leave
        finally:
            # Continues if this task is cancelled meanwhile.
            task = asyncio.create_task(self._let_go(fleet, closing), name="model leaves")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            await asyncio.shield(task)

    async def _let_go(self, fleet: Fleet, closing: AsyncExitStack) -> None:
        await fleet.close()
        await once("model leaves", closing.aclose, lambda _: None)
        await fleet.router.close()
        self.fleets.closed(fleet)
        logger.info("unloaded model %s", fleet.names[0])
        if self._models:  # whose objects were unfrozen with those of this one
            freeze_heap()

    async def _live(self, fleet: Fleet, gone: asyncio.Event, closing: AsyncExitStack) -> None:
        try:
            closing.callback(gc.unfreeze)  # vLLM freezes all objects at each start
            closing.callback(self._forget_items)
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
            self._refuse(fleet, error)

    def _forget_items(self) -> None:
        """Have media processed anew: vLLM names them by their model's path, and the next model
        there may have other settings.
        """
        if self._ready.is_set() and isinstance(arena := self._shared.media_sender.arena, Arena):
            arena.forget()

    def _refuse(self, fleet: Fleet, error: BaseException) -> None:
        MODEL_LOADS.labels(type(error).__name__).inc()
        logger.error("model %s can't be served: %s", fleet.names[0], error)
        self.fleets.give_up(fleet, error)

    async def _load(
        self, fleet: Fleet, gone: asyncio.Event, closing: AsyncExitStack
    ) -> Model | None:
        """Load one model at a time: each takes a core for seconds. None if its workers left."""
        await self._ready.wait()
        async with self._turn:
            if gone.is_set():
                return None
            card = await fleet.contract.card()
            with log_progress(f"loading the processor of {card.model.model}", logger.info):
                serve = copy.copy(self._shared.args.serve)
                try:
                    model = await Model.load(card, fleet, self._shared, closing, serve)
                except _LOADING_ERRORS as error:
                    logger.debug("the model was not loaded", exc_info=True)
                    raise ConfigurationError(
                        f"model {card.model.model} can't be served with the flags of this frontend "
                        f"and the files of this host: {error} (--log-level=debug says where)"
                    ) from error
            if self._several:
                list_together(model.app, lambda: [each.app for each in self._models.values()])
            elif model.preprocessor.takes_text_only:
                await asyncio.to_thread(self._shared.loader.expect_no_media)
            await closing.enter_async_context(model.app.router.lifespan_context(model.app))
            freeze_heap()
        return None if gone.is_set() else model

    async def _only(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.choice.apps[0](scope, receive, send)

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
        self._gate.let_in(self.choice if self._several else self._only)
        self._shared.server.accept()
        if self._shared.siblings is not None:
            self._shared.siblings.serving()
        try:
            yield app
        finally:
            del self._models[app]
            self.choice.apps.remove(app)
            if not self.choice.apps:
                self._gate.let_in(None)

    def _rows(self) -> Iterator[Row]:
        for fleet in self.fleets:
            app = next((app for app in self.choice.apps if app.names == fleet.names), None)
            workers = sum(1 for _ in fleet.members.available())
            figures = (app is not None, workers, 0 if app is None else app.requests)
            yield Row((fleet.names[0],), figures)


def _has_route(app: FastAPI, scope: Scope) -> bool:
    return any(route.matches(scope)[0] is not Match.NONE for route in app.routes)


async def _ended(app: ModelApp) -> None:
    """Wait ``LAST_WORDS_S`` at most for requests; later ones fail when the model is closed."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            while app.requests:
                await app.idle.wait()
    except TimeoutError:
        ending = "ending %d requests of model %s, which has no worker"
        logger.warning(ending, app.requests, app.names[0])

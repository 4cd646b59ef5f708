"""One model: its processor, what runs its requests, and vLLM's app for it."""

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from fastapi import FastAPI

from common.request_plane.card import WorkerCard
from common.transfer.transports import TransferMode
from frontend.args import FrontendArgs
from frontend.fetch import MediaLoader
from frontend.http import (
    FleetStatus,
    History,
    Management,
    Operating,
    PoolingLimits,
    Server,
    Status,
    build_vllm_app,
    history_routes,
    limit_pooling,
    manage_routes,
    operate_routes,
    page_routes,
    replace_engine_routes,
    share_adapters,
    status_routes,
    tokenize_scores_aside,
    watch_speech,
    worker_metrics_routes,
)
from frontend.processes import Siblings
from frontend.processing import Preprocessor
from frontend.request import RequestRunner, RoutedEngineClient
from frontend.workers import Fleet, Fleets, MediaSender


@dataclass(frozen=True)
class Shared:
    """What all models of a process have together.

    Attributes:
        fleets: of all models.
        forget_media: lets all models forget those that were processed.
        siblings: the other processes of this frontend, if there are any.
        pooling: what pooling requests may take.
    """

    args: FrontendArgs
    fleets: Fleets
    forget_media: Callable[[], Awaitable[None]]
    media_sender: MediaSender
    loader: MediaLoader
    server: Server
    siblings: Siblings | None
    pooling: PoolingLimits
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Model:
    """A model that is served.

    Attributes:
        app: vLLM's. Its lifespan still has to be entered.
    """

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
        """Take seconds, most of them in threads.

        Args:
            card: the contract of the fleet.
            closing: closes what was made.
            serve: vLLM's API server arguments, into which the model's are filled.

        Raises:
            ConfigurationError: the model can't be served here.
            Exception: what vLLM raises for arguments that don't fit a model.
        """
        preprocessor = await asyncio.to_thread(_preprocessor, card, serve, shared)
        closing.push_async_callback(preprocessor.close)
        client = _client(preprocessor, fleet, shared)
        tasks = preprocessor.tasks
        app = await build_vllm_app(client, serve, tasks, shared.server)
        limit_pooling(app, shared.pooling)
        watch_speech(app, shared.loader.policy.decode_timeout_s)
        tokenize_scores_aside(app, preprocessor.tokenizing)
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
    return RoutedEngineClient(preprocessor, fleet, fleet.router, runner, shared.siblings)


async def _add_routes(app: FastAPI, shared: Shared) -> None:
    """Those of ours: the same at every model's app."""
    fleets, siblings = shared.fleets, shared.siblings
    status = FleetStatus(Status(fleets, shared.media_sender, [fleets.refusals]), siblings)
    app.include_router(page_routes())
    app.include_router(status_routes(status, several=siblings is not None))
    shared.history.share(siblings)
    app.include_router(history_routes(shared.history))
    app.include_router(worker_metrics_routes(fleets))
    operating = Operating(fleets)
    replace_engine_routes(app, operating)
    app.include_router(operate_routes(operating, shared.forget_media))
    management = Management(lambda: (fleet.router for fleet in fleets), siblings)
    await management.learn()
    app.include_router(manage_routes(management))

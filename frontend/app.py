"""The composition root: all parts of a frontend, made in order and closed in the other."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from fastapi import FastAPI

from common.errors import MmRouterError
from common.fleet_sockets import leaves_host
from common.identity import Incarnation
from common.loop_delay import measure_loop_delay
from common.still_busy import still_busy
from common.stop_signals import StopSignals
from common.supervised import supervise
from common.tracing import enabled
from common.transfer.choice import TransferMode
from common.undo import made_in_thread, undo_on_error
from common.vllm_versions import INSTALLED
from frontend.args import FrontendArgs
from frontend.asgi import App
from frontend.fetch import MediaAllowances, MediaLoader, register
from frontend.http import (
    AdminGuard,
    Admission,
    EarlyStreamErrors,
    FleetStatus,
    History,
    Management,
    MergedMetrics,
    Operating,
    PoolingLimits,
    ReadinessGate,
    RequestIds,
    RetryAfter,
    Server,
    Status,
    Traced,
    build_vllm_app,
    graceful_shutdown,
    history_routes,
    limit_pooling,
    manage_routes,
    operate_routes,
    page_routes,
    replace_engine_routes,
    share_adapters,
    status_routes,
    uvicorn_config,
    worker_metrics_routes,
)
from frontend.processes import Siblings
from frontend.processing import Preprocessor
from frontend.request import RequestRunner, RoutedEngineClient
from frontend.router import Router, ZmqFeeds
from frontend.workers import Fleet, MediaSender

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frontend:
    """The parts that do not depend on the model.

    Attributes:
        models_parts: closes what is made once the first worker has said which model it is.
        siblings: the other processes of this frontend, if there are any.
    """

    args: FrontendArgs
    media_sender: MediaSender
    loader: MediaLoader
    router: Router
    fleet: Fleet
    gate: ReadinessGate
    server: Server
    models_parts: AsyncExitStack
    siblings: Siblings | None
    history: History = field(default_factory=History)

    async def serve(self) -> None:
        """Serve until the process is told to stop and has drained.

        Raises:
            MmRouterError: it can't serve, or can't go on.
        """
        signals = StopSignals()
        if self.siblings is not None:
            await self.siblings.attach(signals)
        leave = graceful_shutdown(
            signals, self.server, self.gate, self.fleet, self.args.process.drain_timeout_s
        )
        try:
            async with asyncio.TaskGroup() as group:
                delay = supervise("loop delay", measure_loop_delay)
                tasks = (
                    group.create_task(delay, name="loop delay"),
                    group.create_task(supervise("history", self.history.run), name="history"),
                    group.create_task(self.fleet.run(), name="discovery"),
                    group.create_task(self._open(), name="open"),
                    group.create_task(leave, name="leave"),
                )
                await self.server.serve()
                for task in tasks:
                    task.cancel()
        except* MmRouterError as errors:
            raise errors.exceptions[0] from None

    async def _open(self) -> None:
        """Wait for the first worker, then build vLLM's app from its card and let users in."""
        with undo_on_error(self._give_up):
            logger.info("waiting for workers in %s", self.args.discovery)
            preprocessor = await self._make_preprocessor()
            app = await self._make_app(preprocessor)
            preprocessor.hf_runs.reset()
            served = Admission(
                MediaAllowances(EarlyStreamErrors(app), self.args.media),
                self.args.http,
                several_keys=len(self.args.api_keys) > 1,
                root_path=self.args.serve.root_path or "",
            )
            await self.gate.open(app, self._with_siblings(Traced(served) if enabled() else served))
            self.server.accept()
            if self.siblings is not None:
                self.siblings.serving()
        logger.info("serving %s", ", ".join(preprocessor.card.served_model_names))

    def _with_siblings(self, served: App) -> App:
        if self.siblings is None:
            return served
        return MergedMetrics(served, self.siblings, self.args.serve.root_path or "")

    def _give_up(self) -> None:
        self.server.should_exit = True

    async def _make_preprocessor(self) -> Preprocessor:
        args = self.args
        with still_busy("waiting for the first worker", logger.info):
            card = await self.fleet.contract.card()
        with still_busy(f"loading the processor of {card.model.model}", logger.info):
            preprocessor = await asyncio.to_thread(
                Preprocessor,
                card,
                args.serve,
                loader=self.loader,
                arena=self.media_sender.arena,
                settings=args.preprocess,
                keep_sources=args.transfer is TransferMode.DISABLED,
            )
        self.models_parts.push_async_callback(preprocessor.close)
        return preprocessor

    async def _make_app(self, preprocessor: Preprocessor) -> FastAPI:
        runner = RequestRunner(
            preprocessor,
            self.fleet,
            self.router,
            self.media_sender,
            self.args.faults,
            model=preprocessor.card.served_model_names[0],
        )
        client = RoutedEngineClient(preprocessor, self.fleet, self.router, runner, self.siblings)
        app = await build_vllm_app(client, self.args.serve, preprocessor.tasks, self.server)
        several = len(self.args.api_keys) > 1
        limit_pooling(app, PoolingLimits(self.args.http, several_keys=several))
        share_adapters(app, self.fleet.adapters)
        own = Status(self.fleet, self.router, self.media_sender)
        status = FleetStatus(own, self.siblings)
        app.include_router(page_routes())
        app.include_router(status_routes(status, several=self.siblings is not None))
        self.history.share(self.siblings)
        app.include_router(history_routes(self.history))
        app.include_router(worker_metrics_routes(self.fleet.members))
        operating = Operating(self.fleet.members)
        replace_engine_routes(app, operating, client.reset_mm_cache)
        app.include_router(operate_routes(operating))
        management = Management(self.router, self.siblings)
        await management.learn()
        app.include_router(manage_routes(management))
        return app


@asynccontextmanager
async def open_frontend(
    args: FrontendArgs, siblings: Siblings | None = None
) -> AsyncIterator[Frontend]:
    """A frontend that only has to be told to serve; all of it is gone afterwards.

    Args:
        siblings: the other processes of this frontend, if there are any.

    Raises:
        ConfigurationError: something that was asked for can't be had.
    """
    async with AsyncExitStack() as closing:
        make_sender = partial(
            MediaSender.create, args.arena.arena_bytes, args.transfer, args.network
        )
        if siblings is not None:
            closing.callback(siblings.close)
            await asyncio.to_thread(siblings.begin, args.plan)
            args = args.share
            make_sender = partial(MediaSender, siblings.arena, args.transfer, args.network)
        key = args.process.fleet_key()
        media_sender = await made_in_thread(make_sender, MediaSender.close)
        closing.callback(media_sender.close)
        loader = MediaLoader(args.media, args.media.cache_bytes)
        closing.push_async_callback(loader.close)
        register(loader)
        feeds = ZmqFeeds(args.router.silence_s, args.router.replay_timeout_s, key=key)
        closing.callback(feeds.close)
        router = Router(args.router, feeds=feeds)
        closing.push_async_callback(router.close)
        fleet = Fleet(
            args.discovery.watcher(key),
            router,
            media_sender,
            Incarnation(secrets.token_hex(8)),
            INSTALLED,
            key,
            trust_remote_code=args.serve.trust_remote_code,
        )
        closing.push_async_callback(fleet.close)
        models_parts = await closing.enter_async_context(AsyncExitStack())
        gate = ReadinessGate(fleet.check_available)
        closing.push_async_callback(gate.close)
        guarded = _guarded(RetryAfter(gate), args)
        server = Server(
            uvicorn_config(guarded, args.serve, args.http),
            siblings,
            refresh_tls=args.serve.enable_ssl_refresh,
        )
        yield Frontend(
            args, media_sender, loader, router, fleet, gate, server, models_parts, siblings
        )


async def serve(args: FrontendArgs, siblings: Siblings | None = None) -> None:
    """Open a frontend and serve until the process is told to stop.

    Args:
        siblings: the other processes of this frontend, if there are any.

    Raises:
        MmRouterError: it can't serve, or can't go on.
    """
    async with open_frontend(args, siblings) as frontend:
        await frontend.serve()


def _guarded(app: App, args: FrontendArgs) -> App:
    """The app, behind the keys of its users and of its admins, if there are any."""
    serve = args.serve
    if serve.uds is None and leaves_host(f"tcp://{serve.host}:{serve.port}") and not args.api_keys:
        logger.warning("anybody who reaches %s may use this API: set --api-key-file", serve.host)
    return RequestIds(
        AdminGuard(
            app,
            args.api_keys,
            args.admin_keys,
            root_path=serve.root_path or "",
            unix_socket=serve.uds is not None,
            isolate=args.keys.isolate_api_keys,
        )
    )

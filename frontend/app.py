"""The composition root: all parts of a frontend, made in order and closed in the other."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from common.aio.stop_signals import StopSignals
from common.aio.supervised import supervise
from common.aio.undo import made_in_thread, undo_on_error
from common.discovery.base import CardWatcher
from common.errors import ConfigurationError, MmRouterError, TooManyStuckThreadsError
from common.fleet_key import FleetKey
from common.identity import Incarnation
from common.observability.loop_delay import measure_loop_delay
from common.observability.still_busy import still_busy
from common.observability.thread_watchdog import MAX_STUCK, WATCHDOG
from common.vllm_compat.versions import INSTALLED
from frontend.args import FrontendArgs
from frontend.asgi import App
from frontend.door import guarded, judged
from frontend.fetch import MediaLoader, register
from frontend.http import (
    PoolingLimits,
    ReadinessGate,
    Server,
    graceful_shutdown,
    uvicorn_config,
)
from frontend.model import Model, Shared, Whole
from frontend.models_from_cards import ModelsFromCards
from frontend.processes import Siblings
from frontend.router import Figures, Router, ZmqFeeds
from frontend.workers import Contract, Fleet, Fleets, Gauges, MediaSender, follow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frontend:
    """The parts that do not depend on the model.

    Attributes:
        models: the fleet of the one model that is served, or what has the fleets of several.
        models_parts: closes what is made once the first worker has said which model it is.
    """

    shared: Shared
    watcher: CardWatcher
    models: Fleet | ModelsFromCards
    gate: ReadinessGate
    models_parts: AsyncExitStack

    async def serve(self) -> None:
        """Serve until the process is told to stop and has drained.

        Raises:
            MmRouterError: it can't serve, or can't go on.
        """
        signals, shared = StopSignals(), self.shared
        if shared.siblings is not None:
            await shared.siblings.attach(signals)
        fleets = _fleets_of(self.models)
        leave = graceful_shutdown(
            signals, shared.server, self.gate, fleets, shared.args.process.drain_timeout_s
        )
        try:
            async with asyncio.TaskGroup() as group:
                delay = supervise("loop delay", measure_loop_delay)
                history = supervise("history", shared.history.run)
                keys = supervise("key files", shared.args.access.follow)
                tasks = (
                    group.create_task(delay, name="loop delay"),
                    group.create_task(history, name="history"),
                    group.create_task(keys, name="key files"),
                    group.create_task(follow(self.watcher, fleets.apply), name="discovery"),
                    group.create_task(self._open(), name="open"),
                    group.create_task(leave, name="leave"),
                    group.create_task(_leave_if_stuck(signals), name="stuck threads"),
                )
                await shared.server.serve()
                for task in tasks:
                    task.cancel()
        except* MmRouterError as errors:
            raise errors.exceptions[0] from None
        if WATCHDOG.stuck > MAX_STUCK:
            raise TooManyStuckThreadsError(
                f"more than {MAX_STUCK} threads did not return from what requests had them do: "
                "start this process again, with --preprocess-workers if media keep doing it"
            )

    async def _open(self) -> None:
        logger.info("waiting for workers in %s", self.shared.args.discovery)
        if isinstance(self.models, ModelsFromCards):
            self.models.open(self.shared, self.gate, self._judged)
        else:
            await self._open_one(self.models)

    async def _open_one(self, fleet: Fleet) -> None:
        """Wait for the first worker, then build vLLM's app from its card and let users in."""
        shared = self.shared
        with undo_on_error(self._give_up):
            place = shared.args.discovery
            with still_busy(f"waiting for the first worker's card in {place}", logger.info):
                card = await fleet.contract.card()
            whole = Whole([fleet], [fleet.router], fleet.members)
            with still_busy(f"loading the processor of {card.model.model}", logger.info):
                try:
                    model = await Model.load(
                        card, fleet, shared, whole, self.models_parts, shared.args.serve
                    )
                except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
                    # What vLLM raises for flags, and for files that this host lacks.
                    logger.debug("the model was not loaded", exc_info=True)
                    raise ConfigurationError(
                        f"model {card.model.model} can't be served with the flags of this frontend "
                        f"and the files of this host: {error} (--log-level=debug says where)"
                    ) from error
            await self.gate.open(model.app, self._judged(model.app))
            shared.server.accept()
            if shared.siblings is not None:
                shared.siblings.serving()
        logger.info("serving %s", ", ".join(card.served_model_names))

    def _judged(self, app: App) -> App:
        return judged(app, self.shared.args, self.shared.siblings)

    def _give_up(self) -> None:
        self.shared.server.should_exit = True


async def _leave_if_stuck(signals: StopSignals) -> None:
    """Drain once too many threads are stuck: only a new process is rid of them."""
    await WATCHDOG.too_many_stuck()
    logger.error(
        "more than %d threads are stuck (mmrouter_stuck_threads): draining, to exit with an error",
        MAX_STUCK,
    )
    signals.terminate()


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
        models = _open_models(args, media_sender, key, closing)
        models_parts = await closing.enter_async_context(AsyncExitStack())
        gate = ReadinessGate(_fleets_of(models).check_available)
        closing.push_async_callback(gate.close)
        server = Server(
            uvicorn_config(guarded(gate, args), args.serve, args.http),
            siblings,
            refresh_tls=args.serve.enable_ssl_refresh,
        )
        pooling = PoolingLimits(args.http, several_keys=args.access.several)
        shared = Shared(args, media_sender, loader, server, siblings, pooling)
        yield Frontend(shared, args.discovery.watcher(key), models, gate, models_parts)


def _open_models(
    args: FrontendArgs, media_sender: MediaSender, key: FleetKey | None, closing: AsyncExitStack
) -> Fleet | ModelsFromCards:
    """What has the workers, of one model or of as many as come."""
    gauges = Gauges()
    make_fleet = _fleets(args, media_sender, key, gauges)
    if not args.models.models_from_cards:
        fleet = make_fleet()
        closing.push_async_callback(fleet.router.close)
        closing.push_async_callback(fleet.close)
        return fleet
    terms = Contract(INSTALLED, key, trust_remote_code=args.serve.trust_remote_code)
    models = ModelsFromCards(
        make_fleet,
        terms,
        gauges,
        most=args.models.max_models,
        root_path=args.serve.root_path or "",
    )
    closing.push_async_callback(models.close)
    return models


def _fleets_of(models: Fleet | ModelsFromCards) -> Fleet | Fleets:
    return models.fleets if isinstance(models, ModelsFromCards) else models


def _fleets(
    args: FrontendArgs, media_sender: MediaSender, key: FleetKey | None, gauges: Gauges
) -> Callable[[], Fleet]:
    """What makes a fleet, and its router, for each model."""
    figures = Figures()
    frontend_id = Incarnation(secrets.token_hex(8))

    def make() -> Fleet:
        feeds = ZmqFeeds(key=key)
        with undo_on_error(feeds.close):
            return Fleet(
                Router(args.router, feeds=feeds, figures=figures),
                media_sender,
                frontend_id,
                INSTALLED,
                key,
                trust_remote_code=args.serve.trust_remote_code,
                gauges=gauges,
            )

    return make


async def serve(args: FrontendArgs, siblings: Siblings | None = None) -> None:
    """Open a frontend and serve until the process is told to stop.

    Args:
        siblings: the other processes of this frontend, if there are any.

    Raises:
        MmRouterError: it can't serve, or can't go on.
    """
    async with open_frontend(args, siblings) as frontend:
        await frontend.serve()

"""Composition root: create all parts of a frontend in order, close them in reverse, and serve."""

import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import uvloop

from common.aio.cleanup import made_in_thread, undo_on_error
from common.aio.processes import StopSignals
from common.aio.supervised import Work, supervise
from common.cli.settings_summary import log_settings
from common.cli.vllm_command_line import configure_vllms_logging
from common.discovery.base import CardWatcher
from common.errors import MmRouterError, TooManyStuckThreadsError
from common.fleet_key import FleetKey
from common.identity import Incarnation
from common.observability.log_lines import configure_logging
from common.observability.telemetry import enable_nvtx
from common.observability.tracing import exporting, prepare
from common.observability.watchdog import MAX_STUCK, WATCHDOG, measure_loop_delay, watch_for_stalls
from common.transfer.pages import give_back_large_memory
from common.vllm_compat.features import INSTALLED
from frontend.args import FrontendArgs, parse
from frontend.door import make_door
from frontend.fetch import CONNECTOR_NAME, MediaLoader, fork_decoders, register
from frontend.http import (
    History,
    Management,
    PoolingLimits,
    ReadinessGate,
    Server,
    graceful_shutdown,
    operator_app,
    queues,
    raise_file_limit,
    uvicorn_config,
)
from frontend.models import Models, Shared, operator_routers
from frontend.processes import Siblings
from frontend.router import Router, ZmqFeeds
from frontend.workers import Contract, Fleet, MediaSender, Refusals, follow, tell_refused

logger = logging.getLogger("frontend")


@dataclass(frozen=True)
class Frontend:
    """The parts that do not depend on the model."""

    shared: Shared
    watcher: CardWatcher
    models: Models
    gate: ReadinessGate
    tell_refused: Work

    async def serve(self) -> None:
        """Serve until told to stop and drained. Raises MmRouterError if it can't serve or go on."""
        signals, shared = StopSignals(), self.shared
        if shared.siblings is not None:
            await shared.siblings.attach(signals)
        fleets = self.models.fleets
        leave = graceful_shutdown(
            signals, shared.server, self.gate, fleets, shared.args.process.drain_timeout_s
        )
        try:
            async with asyncio.TaskGroup() as group:
                delay = supervise("loop delay", measure_loop_delay)
                stalls = supervise("event loop watchdog", watch_for_stalls)
                history = supervise("history", shared.history.run)
                refusals = supervise("refusals", self.tell_refused)
                keys = supervise("key files", shared.args.access.follow)
                tasks = (
                    group.create_task(delay, name="loop delay"),
                    group.create_task(stalls, name="event loop watchdog"),
                    group.create_task(history, name="history"),
                    group.create_task(keys, name="key files"),
                    group.create_task(refusals, name="refusals"),
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
        await self.models.open(self.shared, self.gate)


async def _leave_if_stuck(signals: StopSignals) -> None:
    """Drain once too many threads are stuck: only a new process gets rid of them."""
    await WATCHDOG.too_many_stuck()
    logger.error(
        "more than %d threads are stuck (mmrouter_stuck_threads); draining, then exiting",
        MAX_STUCK,
    )
    signals.terminate()


@asynccontextmanager
async def open_frontend(
    args: FrontendArgs, siblings: Siblings | None = None
) -> AsyncIterator[Frontend]:
    """Open all parts, close them on exit. Raises ConfigurationError if one is unavailable."""
    async with AsyncExitStack() as closing:
        # First, since it forks this process, which has no threads of ours yet.
        processes = fork_decoders(args.media)
        if processes is not None:
            closing.callback(processes.close)
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
        loader = MediaLoader(args.media, args.media.cache_bytes, processes=processes)
        closing.push_async_callback(loader.close)
        register(loader)
        frontend_id = Incarnation(secrets.token_hex(8))
        models = _models(args, media_sender, frontend_id, key)
        closing.push_async_callback(models.close)
        fleets = models.fleets
        history = History(queues=partial(queues, fleets))
        management = Management(lambda: (fleet.router for fleet in fleets), siblings)
        routers = operator_routers(
            fleets,
            media_sender,
            siblings,
            history,
            models.forget_media,
            management,
            args.router.mode,
        )
        gate = ReadinessGate(
            fleets.check_available, operator_app(routers, args.serve.root_path or "")
        )
        server = Server(
            uvicorn_config(make_door(args, gate, siblings, history), args.serve, args.http),
            siblings,
            refresh_tls=args.serve.enable_ssl_refresh,
        )
        pooling = PoolingLimits(args.http, several_keys=args.access.several)
        shared = Shared(
            args,
            fleets,
            routers,
            management,
            media_sender,
            loader,
            server,
            siblings,
            pooling,
            history,
        )
        name = f"{frontend_id} (process {os.getpid()} on {socket.gethostname()})"
        tell = partial(tell_refused, fleets.refusals.notices, name, key)
        yield Frontend(shared, args.discovery.watcher(key), models, gate, tell)


def _models(
    args: FrontendArgs, media_sender: MediaSender, frontend_id: Incarnation, key: FleetKey | None
) -> Models:
    def make(refusals: Refusals) -> Fleet:
        feeds = ZmqFeeds(key=key)
        with undo_on_error(feeds.close):
            return Fleet(
                Router(args.router, feeds=feeds),
                media_sender,
                frontend_id,
                INSTALLED,
                key,
                trust_remote_code=args.serve.trust_remote_code,
                refusals=refusals,
            )

    terms = Contract(INSTALLED, key, trust_remote_code=args.serve.trust_remote_code)
    return Models(make, terms, args.models, root_path=args.serve.root_path or "")


async def serve(args: FrontendArgs, siblings: Siblings | None = None) -> None:
    async with open_frontend(args, siblings) as frontend:
        await frontend.serve()


Run = Callable[[FrontendArgs, Siblings | None], Coroutine[None, None, None]]


def main(run: Run = serve) -> None:
    """Serve until SIGTERM, SIGINT or the parent's order. ``run`` may wrap :func:`serve`."""
    give_back_large_memory()
    siblings = Siblings.join()
    args = parse(sys.argv[1:])
    name = "frontend" if siblings is None else f"frontend {siblings.name}"
    configure_logging(args.process.log_setup(name))
    configure_vllms_logging(args.serve)
    if siblings is None or siblings.name == "0":
        log_settings(logger, args.summary)
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    raise_file_limit(args.http.max_connections)
    try:
        if args.process.nvtx:
            enable_nvtx()
        prepare(args.process.otlp_traces_endpoint, "frontend")
        with exporting(args.process.otlp_traces_endpoint, f"{name} {secrets.token_hex(4)}"):
            uvloop.run(run(args, siblings))
    except MmRouterError as error:
        logger.error("%s", error)
        _exit_from_busy_threads(error.exit_status)
        sys.exit(error.exit_status)
    _exit_from_busy_threads(0)


def _exit_from_busy_threads(status: int) -> None:
    """Exit at once if a thread is still in a decoder's code, which may crash while Python ends."""
    if WATCHDOG.busy:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

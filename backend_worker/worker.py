"""The worker: start the engine, publish the card, serve until told to stop."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Coroutine
from pathlib import Path

import uvloop
from pydantic import ValidationError

from backend_worker.args import WorkerArgs, parse
from backend_worker.engine.config import prepare_environment, with_our_defaults
from backend_worker.engine.ipc_names import make_socket_directory, reap_memory
from backend_worker.engine.vllm_engine import Engine
from backend_worker.kv_events.event_publisher import fleet_events
from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.aio.processes import StopSignals
from common.cli.settings_summary import log_settings
from common.cli.vllm_command_line import configure_vllms_logging
from common.discovery.base import RENEW_S, CardPublisher
from common.errors import (
    ArenaUnavailableError,
    ConfigurationError,
    DiscoveryError,
    EngineGoneError,
    MmRouterError,
)
from common.fleet_key import FleetKey
from common.observability.log_lines import configure_logging, log_progress
from common.observability.telemetry import enable_nvtx
from common.observability.tracing import exporting, prepare
from common.request_plane.card import HostIdentity, WorkerCard, WorkerState
from common.request_plane.fleet_sockets import check_bind
from common.transfer.arena import reap_orphans
from common.transfer.nixl import NixlReceiver
from common.transfer.nixl_processes import nixl_installed
from common.transfer.transports import indispensable, receivers, wanted
from common.vllm_compat.engine_settings import environment_settings
from common.vllm_compat.features import INSTALLED

logger = logging.getLogger("backend_worker")

REQUESTS_PER_SLOT = 4
"""Requests taken for each that the engine runs at once: its queue holds seconds of work, and others
are sent elsewhere."""

PUBLISH_S = 600.0  # retries of the first card: an engine that took minutes to start waits for etcd
SAY_S = 5.0  # how long a leaving worker waits for a file system that hangs before it drains


def run() -> None:
    """Run until SIGTERM or SIGINT. Exit status 1: could not serve; 2: card not publishable."""
    args = parse(sys.argv[1:])
    configure_logging(args.process.log_setup(args.worker_id))
    vllms = Namespace(
        logging_config=args.engine.create_logging_config(),
        enable_log_requests=args.engine.enable_log_requests,
    )
    configure_vllms_logging(vllms, engine=True)
    args.engine.logging_config = vllms.logging_config  # for the engine's processes
    log_settings(logger, args.summary)
    prepare_environment(args.worker.worker_host)
    try:
        if args.process.nvtx:
            enable_nvtx()
        prepare(args.process.otlp_traces_endpoint, "worker")
        uvloop.run(_run(args))
    except MmRouterError as error:
        logger.error("%s", error)
        sys.exit(error.exit_status)


async def _run(args: WorkerArgs) -> None:
    key = args.process.fleet_key()
    check_bind(args.worker.endpoint, key)
    engine_args = with_our_defaults(args.engine, args.engine_given)
    engine_args.kv_events_config = fleet_events(
        engine_args.kv_events_config, key, args.process.fleet_key_file
    )
    async with args.discovery.publisher(key) as publisher:
        await publisher.check(args.worker_id, args.incarnation)
    reap_orphans()  # of frontends that were killed; the next process cleans up
    reap_memory()  # of workers
    make_socket_directory()
    with log_progress(f"loading {engine_args.model}", logger.info):
        try:
            engine = await Engine.start(
                engine_args, args.worker_id, args.adapters, args.worker.encoder_cache_tokens
            )
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            logger.debug("the engine did not start", exc_info=True)
            raise ConfigurationError(_why_not(engine_args.model, error)) from error
    try:
        # Not earlier: engines that a user has forked would get a copy of the exporting threads.
        with exporting(args.process.otlp_traces_endpoint, args.worker_id):
            await _serve(args, engine, key)
    finally:
        engine.shutdown()


def _why_not(model: str, error: Exception) -> str:
    """Explain a failed start by the first paragraph of vLLM's or Transformers' error."""
    said = str(error)
    if isinstance(error, ValidationError):
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
    elif isinstance(error, RuntimeError):  # vLLM's parent knows no more, its child logs the cause
        said += " (the engine's process wrote the cause above)"
    elif isinstance(error, OSError) and not Path(model).is_dir():
        model += ", which is no directory here and was looked for in the Hugging Face hub,"
    paragraph = " ".join(said.partition("\n\n")[0].split())
    return f"the engine of {model} did not start: {paragraph or repr(error)}"


async def _serve(args: WorkerArgs, engine: Engine, key: FleetKey | None) -> None:
    service = WorkerService(
        engine,
        MediaReceiver(receivers(engine.local_renderer().render, await make_nixl_receiver(args))),
        args.worker_id,
        args.incarnation,
        args.worker.endpoint,
        key,
        REQUESTS_PER_SLOT * engine.capacity().max_num_seqs * len(engine.ranks),
    )
    try:
        async with args.discovery.publisher(key) as publisher:
            card = await make_card(args, engine, service.endpoint, key)
            await _publish(publisher, card)
            logger.info(
                "worker %s serves %s at %s", card.worker_id, card.model.model, card.request_endpoint
            )
            await _until_stopped(service, _leave(args, service, publisher, card))
    finally:
        await service.close()


async def make_nixl_receiver(args: WorkerArgs) -> NixlReceiver | None:
    """Create the worker's end of NIXL; start it now if required. Raises ConfigurationError."""
    needed = "nixl" in indispensable(args.transfer)
    if "nixl" not in wanted(args.transfer) or not (needed or nixl_installed()):
        return None
    receiver = NixlReceiver(args.network, memory=args.nixl.memory_mb << 20)
    if needed:
        try:
            await receiver.start()
        except (ConfigurationError, ArenaUnavailableError) as error:
            raise ConfigurationError(f"DYNAMO_MM_TRANSFER=nixl can't be had: {error}") from error
    return receiver


async def make_card(
    args: WorkerArgs, engine: Engine, endpoint: str, key: FleetKey | None
) -> WorkerCard:
    return WorkerCard(
        worker_id=args.worker_id,
        incarnation=args.incarnation,
        state=WorkerState.READY,
        vllm_version=INSTALLED,
        served_model_names=engine.served_model_names(),
        supported_tasks=await engine.supported_tasks(),
        model=engine.model_settings(),
        output=engine.output_settings(),
        environment=environment_settings(),
        engine=engine.engine_settings(),
        cache=engine.cache_settings(),
        reuse=engine.prefix_reuse(),
        capacity=engine.capacity(),
        adapters=list(engine.adapters.known),
        ranks=engine.ranks,
        request_endpoint=endpoint,
        kv_event_sources=engine.kv_event_sources(),
        fleet_key=None if key is None else key.fingerprint,
        host=HostIdentity(hostname=socket.gethostname(), pid=os.getpid()),
    )


async def _publish(publisher: CardPublisher, card: WorkerCard) -> None:
    """Publish the first card. Raises DiscoveryError after :data:`PUBLISH_S`."""
    ends, said = time.monotonic() + PUBLISH_S, False
    while True:
        try:
            return await publisher.publish(card)
        except DiscoveryError as error:
            if time.monotonic() > ends:
                raise
            if not said:
                said = True
                logger.warning("%s; trying again for %.0f s, see --discovery", error, PUBLISH_S)
        await asyncio.sleep(RENEW_S)


async def _leave(
    args: WorkerArgs, service: WorkerService, publisher: CardPublisher, card: WorkerCard
) -> None:
    """Wait for a signal, mark the card as draining, and finish running requests."""
    signals = StopSignals()
    await signals.asked()
    try:
        async with asyncio.timeout(SAY_S):
            await publisher.publish(card.model_copy(update={"state": WorkerState.DRAINING}))
    except (DiscoveryError, TimeoutError) as error:
        # Requests must not be lost for that: frontends learn it when they are refused.
        logger.warning("could not mark the card as draining: %s", str(error) or "no answer")
    logger.info("draining, %d requests are left", service.active_requests)
    draining = asyncio.create_task(service.drain())
    at_once = asyncio.create_task(signals.at_once(args.process.drain_timeout_s))
    await asyncio.wait({draining, at_once}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, at_once):
        task.cancel()
    await asyncio.gather(draining, at_once, return_exceptions=True)
    if service.active_requests:
        logger.warning("the drain timed out: aborting %d requests", service.active_requests)


async def _until_stopped(service: WorkerService, leaving: Coroutine[None, None, None]) -> None:
    """Serve until the worker has left; raise if the engine dies first."""
    serving = asyncio.create_task(service.run())
    waiting = asyncio.create_task(leaving)
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        else:
            await waiting
    except* EngineGoneError as group:
        raise group.exceptions[0] from None
    finally:
        for task in (serving, waiting):
            task.cancel()
        await asyncio.gather(serving, waiting, return_exceptions=True)

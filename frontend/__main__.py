"""``python -m frontend``: the OpenAI endpoint in front of the workers."""

import asyncio
import contextlib
import logging
import os
import secrets
import sys

import uvicorn
import uvloop

from common.errors import MmRouterError
from common.fleet_key import FleetKey
from common.fleet_sockets import leaves_host
from common.identity import Incarnation
from common.settings import configure_logging
from common.stop_signals import StopSignals
from common.telemetry import enable_nvtx
from common.transfer.choice import TransferMode
from common.vllm_versions import INSTALLED
from frontend.args import FrontendArgs, parse
from frontend.asgi import App
from frontend.fetch import CONNECTOR_NAME, MediaAllowances, MediaLoader, register
from frontend.http import (
    AdminGuard,
    Admission,
    EarlyStreamErrors,
    ReadinessGate,
    RetryAfter,
    build_vllm_app,
    graceful_shutdown,
    raise_file_limit,
    status_routes,
    uvicorn_config,
)
from frontend.processing import Preprocessor
from frontend.request import RequestRunner, RoutedEngineClient
from frontend.router import Router, ZmqFeeds
from frontend.workers import Fleet, MediaSender

logger = logging.getLogger("frontend")


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again before we have cleaned up."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # uvicorn's own signature
        yield


def main() -> None:
    """Serve until SIGTERM or SIGINT. Exit status 1 if that is impossible."""
    args = parse(sys.argv[1:])
    configure_logging(args.log_level, "frontend")
    if args.nvtx:
        enable_nvtx()
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    raise_file_limit(args.http.max_connections)
    try:
        uvloop.run(_run(args))
    except MmRouterError as error:
        logger.error("%s", error)
        sys.exit(1)


async def _run(args: FrontendArgs) -> None:
    key = FleetKey.read(args.fleet_key_file) if args.fleet_key_file else None
    media_sender = await asyncio.to_thread(
        MediaSender.create, args.arena_bytes, args.transfer, args.nixl
    )
    router = Router(
        args.router, feeds=ZmqFeeds(args.router.silence_s, args.router.replay_timeout_s, key=key)
    )
    loader = MediaLoader(args.media, args.media.cache_bytes)
    register(loader)
    fleet = Fleet(
        args.discovery.watcher(key),
        router,
        media_sender,
        Incarnation(secrets.token_hex(8)),
        INSTALLED,
        key,
        trust_remote_code=args.serve.trust_remote_code,
    )
    gate = ReadinessGate(fleet.check_available)
    guarded = _guarded(RetryAfter(gate), args)
    server = _Server(uvicorn_config(guarded, args.serve, args.http))
    signals = StopSignals()
    closing = contextlib.AsyncExitStack()
    try:
        async with asyncio.TaskGroup() as group:
            following = group.create_task(fleet.run(), name="discovery")
            opening = group.create_task(
                _open(args, gate, server, fleet, router, media_sender, loader, closing)
            )
            leaving = group.create_task(
                graceful_shutdown(signals, server, gate, fleet, args.drain_timeout_s), name="leave"
            )
            await server.serve()
            for task in (following, opening, leaving):
                task.cancel()
    except* MmRouterError as errors:
        raise errors.exceptions[0] from None
    finally:
        await gate.close()
        await closing.aclose()
        await fleet.close()
        await router.close()
        await loader.close()
        media_sender.close()


def _guarded(app: App, args: FrontendArgs) -> App:
    """The app, behind the keys of its users and of its admins, if there are any."""
    serve = args.serve
    if serve.uds is None and leaves_host(f"tcp://{serve.host}:{serve.port}") and not args.api_keys:
        logger.warning("anybody who reaches %s may use this API: set --api-key-file", serve.host)
    return AdminGuard(
        app,
        args.api_keys,
        args.admin_keys,
        root_path=serve.root_path or "",
        unix_socket=serve.uds is not None,
        isolate=args.isolate_api_keys,
    )


async def _open(
    args: FrontendArgs,
    gate: ReadinessGate,
    server: uvicorn.Server,
    fleet: Fleet,
    router: Router,
    media_sender: MediaSender,
    loader: MediaLoader,
    closing: contextlib.AsyncExitStack,
) -> None:
    """Wait for the first worker, then build vLLM's app from its card and let users in."""
    logger.info("waiting for workers in %s", args.discovery)
    card = await fleet.contract()
    try:
        preprocessor = await asyncio.to_thread(
            Preprocessor,
            card,
            args.serve,
            loader=loader,
            arena=media_sender.arena,
            processes=args.preprocess_workers,
            most_waiting=args.preprocess_queue,
            keep_sources=args.transfer is TransferMode.DISABLED,
        )
        closing.push_async_callback(preprocessor.close)
        runner = RequestRunner(preprocessor, fleet, router, media_sender, args.faults)
        client = RoutedEngineClient(preprocessor, fleet, router, runner)
        app = await build_vllm_app(client, args.serve, preprocessor.tasks, server)
        app.include_router(status_routes(fleet, router, media_sender))
        preprocessor.hf_runs.reset()
        served = Admission(
            MediaAllowances(EarlyStreamErrors(app), args.media),
            args.http,
            several_keys=len(args.api_keys) > 1,
        )
        await gate.open(app, served)
    except BaseException:
        server.should_exit = True
        raise
    logger.info("serving %s", ", ".join(card.served_model_names))


if __name__ == "__main__":
    main()

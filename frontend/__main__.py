"""``python -m frontend``: the OpenAI endpoint in front of the workers."""

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from argparse import Namespace

import uvicorn
import uvloop

from common.discovery.file import FileCardWatcher
from common.errors import MmRouterError
from common.fleet_key import FleetKey
from common.fleet_sockets import leaves_host
from common.identity import Incarnation
from common.settings import configure_logging
from common.stop_signals import StopSignals
from common.telemetry import enable_nvtx
from common.transfer.choice import TransferMode
from frontend import status
from frontend.admission import Admission
from frontend.api_keys import ApiKeyGuard
from frontend.args import FrontendArgs, parse
from frontend.asgi import App
from frontend.drain import leave_when_asked
from frontend.engine_client import RoutedEngineClient
from frontend.fetch.connector import CONNECTOR_NAME, register
from frontend.fetch.loader import MediaLoader
from frontend.first_byte import FirstByte
from frontend.fleet import Fleet
from frontend.front_door import FrontDoor
from frontend.media import MediaLender
from frontend.preprocess import Preprocessor
from frontend.retry_after import RetryAfter
from frontend.router.events import ZmqFeeds
from frontend.router.router import Router
from frontend.server import VLLM_VERSION, build_vllm_app, uvicorn_config

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
    try:
        uvloop.run(_run(args))
    except MmRouterError as error:
        logger.error("%s", error)
        sys.exit(1)


async def _run(args: FrontendArgs) -> None:
    key = FleetKey.read(args.fleet_key_file) if args.fleet_key_file else None
    lender = await asyncio.to_thread(MediaLender.create, args.arena_bytes, args.transfer)
    router = Router(
        args.router, feeds=ZmqFeeds(args.router.silence_s, args.router.replay_timeout_s, key=key)
    )
    loader = MediaLoader(args.media, args.media.cache_bytes)
    register(loader)
    fleet = Fleet(
        FileCardWatcher(args.discovery_dir),
        router,
        lender,
        Incarnation(secrets.token_hex(8)),
        VLLM_VERSION,
        key,
    )
    door = FrontDoor(fleet.check_available)
    served = _guarded(RetryAfter(Admission(FirstByte(door), args.max_inflight)), args.serve)
    server = _Server(uvicorn_config(served, args.serve))
    signals = StopSignals()
    closing = contextlib.AsyncExitStack()
    try:
        async with asyncio.TaskGroup() as group:
            following = group.create_task(fleet.run(), name="discovery")
            opening = group.create_task(
                _open(args, door, server, fleet, router, lender, loader, closing)
            )
            leaving = group.create_task(
                leave_when_asked(signals, server, door, fleet, args.drain_timeout_s), name="leave"
            )
            await server.serve()
            for task in (following, opening, leaving):
                task.cancel()
    except* MmRouterError as errors:
        raise errors.exceptions[0] from None
    finally:
        await door.close()
        await closing.aclose()
        await fleet.close()
        await router.close()
        await loader.close()
        lender.close()


def _guarded(app: App, serve: Namespace) -> App:
    """The app, behind API keys if there are any."""
    if serve.api_key:
        return ApiKeyGuard(app, serve.api_key, serve.root_path or "")
    if serve.uds is None and leaves_host(f"tcp://{serve.host}:{serve.port}"):
        logger.warning("anybody who reaches %s may use this API: set --api-key-file", serve.host)
    return app


async def _open(
    args: FrontendArgs,
    door: FrontDoor,
    server: uvicorn.Server,
    fleet: Fleet,
    router: Router,
    lender: MediaLender,
    loader: MediaLoader,
    closing: contextlib.AsyncExitStack,
) -> None:
    """Wait for the first worker, then build vLLM's app from its card and let users in."""
    logger.info("waiting for workers in %s", args.discovery_dir)
    card = await fleet.contract()
    try:
        preprocessor = await asyncio.to_thread(
            Preprocessor,
            card,
            args.serve,
            loader=loader,
            arena=lender.arena,
            processes=args.preprocess_workers,
            most_waiting=args.preprocess_queue,
            keep_sources=args.transfer is TransferMode.DISABLED,
        )
        closing.push_async_callback(preprocessor.close)
        client = RoutedEngineClient(preprocessor, fleet, router, lender, args.faults)
        app = await build_vllm_app(client, args.serve, preprocessor.tasks, server)
        app.include_router(status.routes(fleet, router, lender))
        preprocessor.hf_runs.reset()
        await door.open(app)
    except BaseException:
        server.should_exit = True
        raise
    logger.info("serving %s", ", ".join(card.served_model_names))


if __name__ == "__main__":
    main()

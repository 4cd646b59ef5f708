"""One process that serves: the frontend, or one of several that are a frontend together."""

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable, Coroutine

import uvloop

from common.aio.supervised import supervise
from common.cli.settings_summary import log_settings
from common.cli.vllm_command_line import configure_vllms_logging
from common.discovery.settings import check_place
from common.errors import MmRouterError
from common.observability.log_lines import configure_logging
from common.observability.telemetry import enable_nvtx
from common.observability.tracing import exporting, prepare
from common.observability.watchdog import WATCHDOG, watch_for_stalls
from common.transfer.pages import give_back_large_memory
from frontend.app import serve
from frontend.args import FrontendArgs, parse
from frontend.fetch import CONNECTOR_NAME
from frontend.http import raise_file_limit
from frontend.processes import Siblings

logger = logging.getLogger("frontend")

Run = Callable[[FrontendArgs, Siblings | None], Coroutine[None, None, None]]


def main(run: Run = serve) -> None:
    """Serve until SIGTERM or SIGINT, or until the parent says so.

    Args:
        run: what serves, :func:`frontend.app.serve` unless something goes round it.
    """
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
        check_place(args.discovery)
        if args.process.nvtx:
            enable_nvtx()
        prepare(args.process.otlp_traces_endpoint, "frontend")
        with exporting(args.process.otlp_traces_endpoint, f"{name} {secrets.token_hex(4)}"):
            uvloop.run(_watched(run(args, siblings)))
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


async def _watched(serving: Coroutine[None, None, None]) -> None:
    watching = asyncio.create_task(supervise("event loop watchdog", watch_for_stalls))
    try:
        await serving
    finally:
        watching.cancel()

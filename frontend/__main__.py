"""``python -m frontend``: the OpenAI endpoint in front of the workers."""

import logging
import os
import sys
from collections.abc import Callable, Coroutine

import uvloop

from common.errors import MmRouterError
from common.process_settings import configure_logging
from common.telemetry import enable_nvtx
from frontend.app import serve
from frontend.args import FrontendArgs, parse
from frontend.fetch import CONNECTOR_NAME
from frontend.http import raise_file_limit

logger = logging.getLogger("frontend")


def main(run: Callable[[FrontendArgs], Coroutine[None, None, None]] = serve) -> None:
    """Serve until SIGTERM or SIGINT. Exit status 1 if that is impossible, 2 if cards can't be
    read where they should be, or uvicorn's 3 if the port can't be had.

    Args:
        run: what serves, :func:`frontend.app.serve` unless something goes round it.
    """
    args = parse(sys.argv[1:])
    configure_logging(args.process.log_level, "frontend")
    if args.process.nvtx:
        enable_nvtx()
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    raise_file_limit(args.http.max_connections)
    try:
        uvloop.run(run(args))
    except MmRouterError as error:
        logger.error("%s", error)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()

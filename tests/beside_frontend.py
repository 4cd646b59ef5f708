"""A frontend with something beside it on its event loop, for programs that watch one."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from frontend.app import main, serve
from frontend.args import FrontendArgs
from frontend.processes import Siblings


def run_frontend_beside(watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a frontend by the command line, and a task for as long as it serves."""

    async def watched(args: FrontendArgs, siblings: Siblings | None) -> None:
        task = asyncio.create_task(watch())
        try:
            await serve(args, siblings)
        finally:
            task.cancel()

    main(watched)

"""The worker with handles: arguments are the worker's, after a FILE.

    python -m tests.chaos.watched_worker FILE ARGUMENTS...

:mod:`tests.chaos.watched` says which signals it answers. Nothing heavy is imported here, as in
``backend_worker/__main__.py``.
"""

import sys
from pathlib import Path

from backend_worker.supervise import supervise


def main() -> None:
    """Be the parent, and the watched worker in a child of it."""
    file = Path(sys.argv.pop(1))
    supervise()
    _watch(file)
    from backend_worker.worker import run

    run()


def _watch(file: Path) -> None:
    """Answer signals from the moment when the engine is up."""
    from backend_worker import worker
    from backend_worker.args import WorkerArgs
    from backend_worker.engine.vllm_engine import Engine
    from common.fleet_key import FleetKey
    from common.request_plane.card import WorkerCard
    from tests.chaos.watched import watch

    make_card = worker.make_card

    async def watched(
        args: WorkerArgs, engine: Engine, endpoint: str, key: FleetKey | None
    ) -> WorkerCard:
        watch(file)
        return await make_card(args, engine, endpoint, key)

    worker.make_card = watched


if __name__ == "__main__":
    main()

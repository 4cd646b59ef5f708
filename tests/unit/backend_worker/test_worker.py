"""How a worker leaves."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from backend_worker import worker
from backend_worker.args import parse
from common.card import WorkerCard, WorkerState
from common.discovery.base import CardPublisher
from common.errors import DiscoveryError
from common.identity import Incarnation, WorkerId
from tests.fakes.cards import make_card
from tests.waiting import until


class Service:
    """As much of a service as leaving takes."""

    active_requests = 0

    def __init__(self) -> None:
        self.drained = False

    async def drain(self) -> None:
        self.drained = True


class Publisher(CardPublisher):
    """Refuses, or hangs."""

    def __init__(self, error: Exception | None) -> None:
        self.asked = asyncio.Event()
        self._error = error

    async def check(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        raise AssertionError("it serves already")

    async def publish(self, card: WorkerCard) -> None:
        assert card.state is WorkerState.DRAINING
        self.asked.set()
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()

    async def withdraw(self) -> None:
        pass


@pytest.mark.parametrize("error", [DiscoveryError("the directory is gone"), None])
async def test_a_worker_that_can_not_say_that_it_leaves_drains_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None
) -> None:
    monkeypatch.setattr(worker, "SAY_S", 0.05)
    args = parse(["--model", "m", f"--discovery-dir={tmp_path}"])
    service: Any = Service()
    publisher = Publisher(error)
    leaving = asyncio.create_task(worker._leave(args, service, publisher, make_card()))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await publisher.asked.wait()
    await until(leaving.done)
    await leaving
    assert service.drained

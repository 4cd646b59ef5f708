"""What the request plane refuses and holds back: drain and bounds, over real sockets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from vllm.outputs import RequestOutput

from backend_worker.engine import Items
from backend_worker.obtain import MediaInlet
from backend_worker.service import WorkerService
from common.identity import Incarnation, WorkerId
from common.protocol import Ack, Failed, FailureKind, Output, Submit
from common.transfer.arena import Arena
from common.transfer.choice import TransferMode
from tests.unit.test_request_plane import (
    Plane,
    ScriptedEngine,
    collect,
    media,
    no_rendering,
    output,
    until,
)


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    engine = ScriptedEngine()
    service = WorkerService(
        engine,
        MediaInlet(None, no_rendering),
        WorkerId("w0"),
        Incarnation("i0"),
        "tcp://127.0.0.1:0",
    )
    plane = Plane(engine, service, Arena(1 << 20), TransferMode.SHM)
    await plane.open()
    yield plane
    await plane.close()


class Gate:
    """A script that answers, and finishes when a test says so."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()

    async def __call__(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("first", finished=False)
        await self.finish.wait()
        yield output("last", finished=True)


async def test_a_draining_worker_finishes_what_it_has_and_refuses_the_rest(plane: Plane) -> None:
    gate = plane.engine.script = Gate()
    running = asyncio.create_task(collect(plane.dispatch(name="running")))
    await until(lambda: plane.engine.running == 1)
    draining = asyncio.create_task(plane.service.drain())
    await asyncio.sleep(0)

    cat = media("cat", 7)
    answers = await collect(plane.dispatch(cat, loans=await plane.lend(cat), name="late"))
    assert [type(answer) for answer in answers] == [Ack, Failed]
    failed = answers[-1]
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.BUSY and "draining" in failed.message
    assert plane.leases() == 0
    assert not draining.done()

    gate.finish.set()
    await asyncio.wait_for(draining, 10)
    last = (await running)[-1]
    assert isinstance(last, Output) and last.finished
    assert plane.service.active_requests == 0


async def test_the_end_of_the_last_request_arrives_although_the_worker_leaves(plane: Plane) -> None:
    gate = plane.engine.script = Gate()
    running = [
        asyncio.create_task(collect(plane.dispatch(name=f"running-{number}")))
        for number in range(50)
    ]
    await until(lambda: plane.engine.running == len(running))
    gate.finish.set()
    await plane.service.drain()
    plane.serving.cancel()
    await plane.service.close()
    for answers in await asyncio.gather(*running):
        last = answers[-1]
        assert isinstance(last, Output) and last.finished

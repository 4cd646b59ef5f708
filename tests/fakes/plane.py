"""Both ends of the request plane over real sockets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import torch
import zmq.asyncio
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.sampling_params import SamplingParams

from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.identity import Incarnation, MmHash, RequestId, WorkerId
from common.request_plane.protocol import (
    MediaPart,
    Status,
    Submit,
)
from common.transfer.arena.arena import Arena
from common.transfer.base import MediaHandle
from common.transfer.nixl.receiver import NixlReceiver
from common.transfer.nixl_processes.network import NixlNetwork
from common.transfer.transports import TransferMode, receivers
from frontend.processing.preprocessor import MediaItem
from frontend.workers.dispatch import Answer
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender
from tests.fakes.cards import make_card
from tests.fakes.engine import ScriptedEngine, no_rendering
from tests.waiting import until


def media(name: str, value: int, side: int = 64) -> MediaItem:
    item = MultiModalKwargsItem(
        {
            "pixels": MultiModalFieldElem(
                data=torch.full((side, side), value, dtype=torch.uint8),
                field=MultiModalBatchedField(),
            )
        }
    )
    part = MediaPart("image", MmHash(name), 0, 4, None)
    return MediaItem(part, name, 4, side * side, item)  # type: ignore[arg-type]


class Plane:
    """A service, a link and a media_sender, as a frontend and a worker have them."""

    def __init__(
        self,
        engine: ScriptedEngine,
        service: WorkerService,
        arena: Arena | None,
        mode: TransferMode,
    ) -> None:
        self.engine = engine
        self.service = service
        self.arena = arena
        self.media_sender = MediaSender(arena, mode)
        self.statuses: list[Status] = []
        self.serving = asyncio.create_task(service.run())
        card = make_card(request_endpoint=service.endpoint)
        self.context = zmq.asyncio.Context()
        self.link = WorkerLink(card, self.context, Incarnation("f"), self.statuses.append)
        self.link._on_terms = lambda reply: self.media_sender.answered(WorkerId("w0"), reply)
        self._mode = mode

    async def open(self) -> None:
        await self.link.open(self.media_sender.offer())
        self.media_sender.connect(WorkerId("w0"), self.link.reply)
        if self.arena is not None and self._mode in (TransferMode.SHM, TransferMode.NIXL):
            # A worker doesn't let us wait for long: NIXL may be ready after the session began.
            await until(lambda: self.media_sender.transport(WorkerId("w0")) == self._mode.value)

    async def close(self) -> None:
        await self.link.close()
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        await self.service.close()
        self.context.destroy(linger=0)
        self.media_sender.close()

    async def send(self, *items: MediaItem) -> list[MediaHandle]:
        return await self.media_sender.send(WorkerId("w0"), items)

    def leases(self) -> int:
        assert self.arena is not None
        return self.arena.statistics().leases

    def dispatch(
        self,
        *items: MediaItem,
        handles: list[MediaHandle] | None = None,
        name: str = "r",
        computed: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Answer]:
        submit = Submit(
            RequestId(name), [1, 2], SamplingParams(), [item.part for item in items], []
        )
        return self.link.dispatch(submit, handles or [], computed=computed)


async def collect(answers: AsyncGenerator[Answer]) -> list[Answer]:
    async with asyncio.timeout(60), aclosing(answers):
        return [answer async for answer in answers]


@asynccontextmanager
async def open_plane(transport: str, *, max_requests: int = 1024) -> AsyncIterator[Plane]:
    """A plane whose media travel by ``shm``, ``nixl`` or ``inline``."""
    engine = ScriptedEngine()
    nixl = transport == "nixl"
    network = NixlReceiver(NixlNetwork(), slots=2, memory=1 << 20) if nixl else None
    service = WorkerService(
        engine,
        MediaReceiver(receivers(no_rendering, network)),
        WorkerId("w0"),
        Incarnation("i0"),
        "tcp://127.0.0.1:0",
        max_requests=max_requests,
    )
    arena = None if transport == "inline" else Arena(1 << 20)
    plane = Plane(engine, service, arena, TransferMode.NIXL if nixl else TransferMode.SHM)
    await plane.open()
    assert plane.media_sender.transport(WorkerId("w0")) == transport
    yield plane
    await plane.close()

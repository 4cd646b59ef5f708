"""NIXL is there when a worker needs it, not before, and comes back when a process of it dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.errors import ArenaUnavailableError
from common.identity import Incarnation, WorkerId
from common.request_plane.protocol import Ack
from common.transfer import handshake
from common.transfer.arena.arena import Arena
from common.transfer.arena.file import ArenaMapping
from common.transfer.arena.layout import ArenaOffer
from common.transfer.base import Attachment
from common.transfer.handshake import TransferOffer, TransferReply
from common.transfer.nixl.receiver import NixlReceiver
from common.transfer.nixl.sender import NixlSender
from common.transfer.nixl_processes.network import NixlNetwork, nixl_installed
from common.transfer.shm import ShmReceiver
from common.transfer.transports import TransferMode, receivers
from tests.fakes.engine import ScriptedEngine, no_rendering
from tests.fakes.plane import Plane, collect, media
from tests.waiting import until

pytestmark = pytest.mark.skipif(not nixl_installed(), reason="nixl is not installed")

WORKER = WorkerId("w0")


class AutoPlane(Plane):
    """A frontend and a worker that choose by themselves, wired as the fleet wires them."""

    def __init__(self) -> None:
        self.receiver = NixlReceiver(NixlNetwork(), slots=2, memory=1 << 20)
        engine = ScriptedEngine()
        service = WorkerService(
            engine,
            MediaReceiver(receivers(no_rendering, self.receiver)),
            WORKER,
            Incarnation("i0"),
            "tcp://127.0.0.1:0",
        )
        super().__init__(engine, service, Arena(1 << 20), TransferMode.AUTO)
        self.link._on_terms = lambda reply: self.media_sender.answered(WORKER, reply)

    async def open(self) -> None:
        await self.link.open(self.media_sender.offer())
        self.media_sender.connect(WORKER, self.link.reply, self.link.offer)

    @property
    def way(self) -> str | None:
        return self.media_sender.transport(WORKER)

    @property
    def started(self) -> bool:
        """Whether there is a process that holds an agent."""
        return bool(self.media_sender.started) or self.receiver._reading.pid is not None

    async def carry(self, name: str, value: int, way: str) -> None:
        item = media(name, value)
        handles = await self.send(item)
        assert [handle.metadata.transport for handle in handles] == [way]
        answers = await collect(self.dispatch(item, handles=handles, name=name))
        assert isinstance(answers[0], Ack), "it arrived as it was leased, so nothing was asked for"
        seen = self.engine.seen[-1][item.part.mm_hash]
        assert torch.equal(seen, item.item["pixels"].data)
        assert self.leases() == 0


@pytest.fixture
async def auto() -> AsyncIterator[AutoPlane]:
    plane = AutoPlane()
    yield plane
    await plane.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker sees other shared memory, as in another container."""

    def attach(self: ShmReceiver, offer: ArenaOffer) -> ArenaMapping:
        raise ArenaUnavailableError("can't open the arena")

    monkeypatch.setattr(ShmReceiver, "attach", attach)


async def test_no_agent_exists_where_the_arena_can_be_mapped(auto: AutoPlane) -> None:
    await auto.open()
    await auto.carry("cat", 7, "shm")
    assert not auto.started


@pytest.mark.usefixtures("elsewhere")
async def test_nixl_comes_when_a_worker_needs_it_and_comes_back(auto: AutoPlane) -> None:
    assert not auto.started
    await auto.open()
    assert auto.way == "inline", "what is sent before it is there needn't wait"
    await auto.carry("early", 1, "inline")
    await until(lambda: auto.way == "nixl")
    await auto.carry("cat", 7, "nixl")
    sender = auto.media_sender.started["nixl"]
    assert isinstance(sender, NixlSender)
    for number in range(2):
        assert sender.pid is not None
        os.kill(sender.pid, signal.SIGKILL)
        await until(lambda: auto.way == "inline")
        await until(lambda: auto.way == "nixl")
        await auto.carry(f"again-{number}", number, "nixl")
    peers = auto.receiver._peers
    assert sender.offer is not None
    assert list(peers._offers) == [sender.offer.agent], "former ones are forgotten"


@pytest.mark.usefixtures("elsewhere")
async def test_no_agent_exists_for_a_host_out_of_reach(
    auto: AutoPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = "frontend.workers.media_sender.namespace"
    monkeypatch.setattr(elsewhere, lambda kind: f"another host's {kind}")
    await auto.open()
    assert auto.way == "inline"
    reply = handshake.parse_reply(auto.link.reply)
    assert not reply.could_nixl
    assert "--nixl-interface" in reply.refusals[-1]
    await auto.carry("cat", 7, "inline")
    assert not auto.media_sender._offering
    assert not auto.started


async def test_a_worker_whose_nixl_hangs_is_reached_all_the_same(
    auto: AutoPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frontend doesn't wait for ever for a session: it would never get one."""
    go_on = asyncio.Event()
    attach = MediaReceiver.attach

    async def hangs(self: MediaReceiver, offer: TransferOffer) -> tuple[TransferReply, Attachment]:
        await go_on.wait()
        return await attach(self, offer)

    monkeypatch.setattr(MediaReceiver, "attach", hangs)
    await auto.open()
    assert auto.way == "inline"
    await auto.carry("early", 1, "inline")
    go_on.set()
    await until(lambda: auto.way == "shm")
    await auto.carry("cat", 7, "shm")


@pytest.mark.parametrize(
    ("network", "ipc", "loopback", "reaches"),
    [
        (NixlNetwork(), True, False, True),
        (NixlNetwork(), False, True, False),
        (NixlNetwork(allow_tcp=True), True, False, False),
        (NixlNetwork(allow_tcp=True), False, True, True),
        (NixlNetwork("lo", allow_tcp=True), False, False, False),
        (NixlNetwork("eth0", allow_tcp=True), False, False, True),
    ],
)
def test_nothing_is_started_that_leads_nowhere(
    network: NixlNetwork, ipc: bool, loopback: bool, reaches: bool
) -> None:
    assert network.reaches(same_ipc=ipc, same_loopback=loopback) == reaches


def test_namespaces_have_names() -> None:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert handshake.namespace("ipc").startswith(f"{boot_id} ipc:[")
    assert handshake.namespace("net") != handshake.namespace("ipc")
    assert handshake.namespace("none such") == ""

"""NIXL between two processes, within this host and over TCP.

Over TCP the process that serves the arena sends the bytes itself, so a paused one is a peer that
hangs in the middle of a read.
"""

import asyncio
import base64
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from common.errors import (
    ArenaUnavailableError,
    ConfigurationError,
    CorruptSegmentError,
    StaleSegmentError,
    TransferError,
    TransferTimeoutError,
)
from common.identity import MmHash
from common.transfer.arena.arena import Arena
from common.transfer.arena.file import reap_orphans
from common.transfer.base import Received
from common.transfer.handshake import NixlOffer
from common.transfer.metadata import NixlMetadata, decode_metadata, encode_metadata
from common.transfer.nixl.receiver import MAX_OVERDUE, NixlReceiver
from common.transfer.nixl.sender import NixlSender
from common.transfer.nixl_processes.agent import NixlAgent
from common.transfer.nixl_processes.network import NixlNetwork, nixl_installed
from common.transfer.nixl_processes.reader import pause
from tests.open_files import open_files
from tests.unit.common.transfer.items import image, image_hash, is_image, same
from tests.unit.common.transfer.process import Process
from tests.waiting import until

FRONTEND = "tests.unit.common.transfer.frontend_process:frontend"

needs_nixl = pytest.mark.skipif(not nixl_installed(), reason="nixl is not installed")

_PIDFD_GETFD = 438

LARGE = 15_000
"""Rows of an image of 17.6 MB: more than socket buffers take at once, and nine pieces, of which
:data:`AT_ONCE` are read at the same time.
"""
AT_ONCE = 8


class Frontend(Process):
    """A second process with an arena, and a third that serves it."""

    def __init__(self, *, tcp: bool) -> None:
        super().__init__(FRONTEND, "nixl", 80_000_000, tcp)
        self.network = NixlNetwork(allow_tcp=tcp)
        self._seed = 0
        self._leased: set[int] = set()
        self._paused: int | None = None

    @cached_property
    def _started(self) -> bool:
        return self.read() is None

    @property
    def offer(self) -> NixlOffer:
        """The present one. Waits until the process is up."""
        return NixlOffer.model_validate(self._current()[1])

    @property
    def server(self) -> int:
        """Pid of the process that serves the arena now."""
        return int(self._current()[0])

    def _current(self) -> Any:
        assert self._started
        return self.ask(["offer", 0])

    def pause(self) -> None:
        self._paused = self.server
        os.kill(self._paused, signal.SIGSTOP)

    def resume(self) -> None:
        """UCX ends the process if its reader has died meanwhile."""
        if self._paused is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._paused, signal.SIGCONT)
        self._paused = None

    def send(self, rows: int = 64) -> tuple[int, NixlMetadata]:
        """Lend a new image; gives its seed, too."""
        self._seed += 1
        self._leased.add(self._seed)
        return self._seed, NixlMetadata.model_validate(self.ask(["send", self._seed, rows]))

    def release(self, seed: int) -> None:
        self._leased.remove(seed)
        self.ask(["release", seed])

    def release_all(self) -> None:
        for seed in list(self._leased):
            self.release(seed)


MakeReceiver = Callable[..., NixlReceiver]
Connect = Callable[..., Awaitable[NixlReceiver]]


@pytest.fixture
async def make_receiver() -> AsyncIterator[MakeReceiver]:
    made: list[NixlReceiver] = []

    def make(network: NixlNetwork, *, slots: int = 2, memory: int = 24 << 20) -> NixlReceiver:
        made.append(NixlReceiver(network, slots=slots, memory=memory, deadline=20.0))
        return made[-1]

    yield make
    for receiver in made:
        await receiver.close()


@pytest.fixture
def connect(make_receiver: MakeReceiver) -> Connect:
    async def make(frontend: Frontend, *, slots: int = 2, deadline: float = 20.0) -> NixlReceiver:
        """A receiver with a deadline for what comes once it is connected."""
        receiver = make_receiver(frontend.network, slots=slots)
        await receiver.attach(frontend.offer)
        receiver._peers.deadline = deadline
        return receiver

    return make


# Processes take seconds to start, so all start together, and tests release what they leased.


class Frontends(NamedTuple):
    this_host: Frontend
    tcp: Frontend
    tcp_to_be_killed: Frontend


@pytest.fixture(scope="module")
def frontends() -> Iterator[Frontends]:
    with contextlib.ExitStack() as stack:
        yield Frontends(*[stack.enter_context(Frontend(tcp=tcp)) for tcp in (False, True, True)])
    reap_orphans()


@pytest.fixture
def frontend(frontends: Frontends) -> Iterator[Frontend]:
    frontends.this_host.offer  # noqa: B018 # wait for it outside of what tests time
    yield frontends.this_host
    frontends.this_host.release_all()


@pytest.fixture
def tcp_frontend(frontends: Frontends) -> Iterator[Frontend]:
    frontends.tcp.offer  # noqa: B018 # likewise
    yield frontends.tcp
    frontends.tcp.resume()
    frontends.tcp.release_all()


@pytest.fixture(params=["frontend", "tcp_frontend"])
def each_frontend(request: pytest.FixtureRequest) -> Frontend:
    """One after the other, over both networks."""
    frontend: Frontend = request.getfixturevalue(request.param)
    return frontend


@needs_nixl
async def test_items_arrive_in_the_order_of_the_request(
    each_frontend: Frontend, make_receiver: MakeReceiver
) -> None:
    frontend = each_frontend
    receiver = make_receiver(frontend.network)
    await asyncio.gather(receiver.attach(frontend.offer), receiver.attach(frontend.offer))
    await receiver.attach(frontend.offer)
    sent = [frontend.send(LARGE), frontend.send(), frontend.send(), frontend.send()]
    seeds, metadata = [seed for seed, _ in sent], [each for _, each in sent]
    for _ in range(3):
        received = await asyncio.gather(*map(receiver.receive, metadata))
        assert all(is_image(each.item, seed) for each, seed in zip(received, seeds, strict=True))
        assert receiver.free_slots == 2, "only reads take slots, not requests"
        for each in received:
            each.release()


@needs_nixl
async def test_of_a_burst_one_read_begins_in_a_turn_of_the_event_loop(
    frontend: Frontend, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beginning fifty at once would take the loop to itself for more than a millisecond."""
    receiver = await connect(frontend)
    turn = 0
    begun = []
    read = receiver._reading.read

    def noted(offer: NixlOffer, metadata: NixlMetadata) -> Coroutine[Any, Any, Received]:
        begun.append(turn)
        return read(offer, metadata)

    monkeypatch.setattr(receiver._reading, "read", noted)
    metadata = [frontend.send()[1] for _ in range(6)]
    receiving = asyncio.gather(*map(receiver.receive, metadata))
    while not receiving.done():
        await asyncio.sleep(0)
        turn += 1
    for received in await receiving:
        received.release()
    assert len(begun) == len(set(begun)) == len(metadata)


@needs_nixl
async def test_what_can_be_wrong_with_a_segment(
    frontend: Frontend, make_receiver: MakeReceiver
) -> None:
    receiver = make_receiver(frontend.network)
    seed, metadata = frontend.send()
    with pytest.raises(ArenaUnavailableError, match="isn't connected"):
        await receiver.receive(metadata)
    await receiver.attach(frontend.offer)
    wrong: list[tuple[dict[str, object], type[TransferError]]] = [
        ({"mm_hash": MmHash("f" * 64)}, CorruptSegmentError),
        ({"envelope_size": 99}, CorruptSegmentError),
        ({"buffer_sizes": (5,)}, CorruptSegmentError),
        ({"buffer_sizes": (1 << 40,)}, CorruptSegmentError),
        ({"offset": 0}, CorruptSegmentError),
        ({"offset": 1 << 40}, CorruptSegmentError),
        ({"offset": metadata.offset + 64}, StaleSegmentError),
        ({"generation": 99}, StaleSegmentError),
        ({"checksum": "00" * 16}, CorruptSegmentError),
    ]
    for change, error in wrong:
        with pytest.raises(error):
            await receiver.receive(metadata.model_copy(update=change))
        assert receiver.free_slots == 2
    with await receiver.receive(metadata) as received:
        assert is_image(received.item, seed)


@needs_nixl
async def test_a_reclaimed_segment_is_stale(frontend: Frontend, connect: Connect) -> None:
    receiver = await connect(frontend)
    late_seed, late = frontend.send(LARGE)
    for _ in range(5):
        frontend.release(frontend.send(LARGE)[0])
    with await receiver.receive(late):
        pass
    frontend.release(late_seed)
    for _ in range(5):
        frontend.release(frontend.send(LARGE)[0])
    with pytest.raises(StaleSegmentError):
        await receiver.receive(late)
    assert receiver.free_slots == 2


@needs_nixl
async def test_an_offer_of_another_arena_is_refused(
    frontend: Frontend, make_receiver: MakeReceiver
) -> None:
    receiver = make_receiver(frontend.network)
    arena = frontend.offer.arena.model_copy(update={"nonce": "00" * 32})
    with pytest.raises(ArenaUnavailableError, match="probe"):
        await receiver.attach(frontend.offer.model_copy(update={"arena": arena}))
    nonsense = {
        NixlOffer.pack_metadata(b"nonsense"): "can't reach",
        NixlOffer.pack_metadata(b"") + "!": "malformed",
    }
    for metadata, reason in nonsense.items():
        with pytest.raises(ArenaUnavailableError, match=reason):
            await receiver.attach(frontend.offer.model_copy(update={"metadata": metadata}))
    assert receiver.free_slots == 2


@needs_nixl
async def test_an_offer_of_a_build_with_other_checksums_is_refused(
    frontend: Frontend, make_receiver: MakeReceiver
) -> None:
    """Either way, so that media travel inline rather than fail one by one."""
    receiver = make_receiver(frontend.network)
    plain = base64.b64encode(frontend.offer.unpack_metadata()).decode()
    with pytest.raises(ArenaUnavailableError, match="the same version"):
        await receiver.attach(frontend.offer.model_copy(update={"metadata": plain}))
    with pytest.raises(ValueError, match="base64"):  # what such a build makes of ours
        base64.b64decode(frontend.offer.metadata, validate=True)


@needs_nixl
async def test_a_frontend_that_left_can_come_back(frontend: Frontend, connect: Connect) -> None:
    receiver = await connect(frontend)
    seed, metadata = frontend.send()
    kept = await receiver.receive(metadata)
    receiver._peers.detach(frontend.offer.agent)
    receiver._peers.detach(frontend.offer.agent)
    with pytest.raises(ArenaUnavailableError):
        await receiver.receive(metadata)
    assert is_image(kept.item, seed)
    await receiver.attach(frontend.offer)
    with await receiver.receive(metadata) as received:
        assert is_image(received.item, seed)


@needs_nixl
async def test_an_old_sessions_end_takes_nothing_from_a_newer_one(
    frontend: Frontend, make_receiver: MakeReceiver
) -> None:
    receiver = make_receiver(frontend.network)
    older = await receiver.attach(frontend.offer)
    newer = await receiver.attach(frontend.offer)
    older.detach()
    older.detach()
    seed, metadata = frontend.send()
    with await receiver.receive(metadata) as received:
        assert is_image(received.item, seed)
    newer.detach()
    with pytest.raises(ArenaUnavailableError):
        await receiver.receive(metadata)


@needs_nixl
async def test_no_read_goes_on_once_a_receiver_is_closed(
    tcp_frontend: Frontend, make_receiver: MakeReceiver
) -> None:
    """It would hold the memory that is read to. Whether a frontend that left still lives is found
    out by a read.
    """
    receiver = make_receiver(tcp_frontend.network)
    attachment = await receiver.attach(tcp_frontend.offer)
    name = f"nixl-{tcp_frontend.offer.agent}"
    tcp_frontend.pause()
    attachment.detach()
    await until(lambda: name in {task.get_name() for task in asyncio.all_tasks()})
    await receiver.close()
    assert name not in {task.get_name() for task in asyncio.all_tasks()}
    tcp_frontend.resume()


@needs_nixl
async def test_a_frontend_that_hangs_and_goes_on(tcp_frontend: Frontend, connect: Connect) -> None:
    """Bytes that come after the deadline must not land in another item's memory."""
    receiver = await connect(tcp_frontend, slots=2 * AT_ONCE, deadline=0.5)
    (late_seed, late), (seed, metadata) = tcp_frontend.send(LARGE), tcp_frontend.send(LARGE)
    tcp_frontend.pause()
    with pytest.raises(TransferTimeoutError):
        await receiver.receive(late)
    assert receiver.free_slots == AT_ONCE, "its slots may still be written to"
    receiver._peers.deadline = 20.0
    tcp_frontend.resume()
    for _ in range(5):
        with await receiver.receive(metadata) as received:
            assert is_image(received.item, seed)
    await until(lambda: receiver.free_slots == 2 * AT_ONCE)
    assert receiver._peers._overdue[tcp_frontend.offer.agent] == 0
    with await receiver.receive(late) as received:
        assert is_image(received.item, late_seed)


@needs_nixl
async def test_a_frontend_that_hangs_is_left_alone_after_some_reads(
    tcp_frontend: Frontend, connect: Connect
) -> None:
    slots = (MAX_OVERDUE + 1) * AT_ONCE
    receiver = await connect(tcp_frontend, slots=slots, deadline=0.3)
    _, metadata = tcp_frontend.send(LARGE)
    tcp_frontend.pause()
    reads = [receiver.receive(metadata) for _ in range(MAX_OVERDUE)]
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(outcome, TransferTimeoutError)
    with pytest.raises(ArenaUnavailableError, match="overdue"):
        await receiver.receive(metadata)
    receiver._peers.detach(tcp_frontend.offer.agent)
    assert receiver._peers._left
    tcp_frontend.resume()
    await until(lambda: receiver.free_slots == slots)
    assert receiver._peers._left, "it lives, so the connection is kept"


def sockets(pid: int) -> set[Path]:
    return {target for target in open_files(pid).values() if target.name.startswith("socket:")}


@needs_nixl
async def test_coming_back_costs_no_sockets(
    each_frontend: Frontend, make_receiver: MakeReceiver
) -> None:
    """NIXL doesn't close its connections to agents that live."""
    frontend = each_frontend
    receiver = make_receiver(frontend.network)
    seed, metadata = frontend.send()
    first: set[Path] | None = None
    for pause_s in (0.0, 0.0, 0.3, 1.5):
        await receiver.attach(frontend.offer)
        with await receiver.receive(metadata) as received:
            assert is_image(received.item, seed)
        assert receiver._reading.pid is not None
        now = sockets(receiver._reading.pid) | sockets(frontend.server)
        first = first or now
        assert now <= first
        receiver._peers.detach(frontend.offer.agent)
        await asyncio.sleep(pause_s)


@needs_nixl
async def test_a_frontend_that_hangs_when_it_comes_back(
    tcp_frontend: Frontend, connect: Connect
) -> None:
    receiver = await connect(tcp_frontend, slots=4, deadline=0.3)
    seed, metadata = tcp_frontend.send()
    tcp_frontend.pause()
    receiver._peers.detach(tcp_frontend.offer.agent)
    await asyncio.sleep(0.5)
    await receiver.attach(tcp_frontend.offer)  # it isn't known to have ended
    with pytest.raises(TransferTimeoutError):
        await receiver.receive(metadata)
    receiver._peers.deadline = 20.0
    tcp_frontend.resume()
    with await receiver.receive(metadata) as received:
        assert is_image(received.item, seed)
    await until(lambda: receiver._peers._overdue[tcp_frontend.offer.agent] == 0)


@needs_nixl
async def test_closing_while_a_read_hangs(tcp_frontend: Frontend, connect: Connect) -> None:
    receiver = await connect(tcp_frontend, deadline=0.3)
    _, metadata = tcp_frontend.send(LARGE)
    tcp_frontend.pause()
    with pytest.raises(TransferTimeoutError):
        await receiver.receive(metadata)
    await receiver.close()
    tcp_frontend.resume()
    await asyncio.sleep(0.3)
    with pytest.raises(ArenaUnavailableError):
        await receiver.receive(metadata)


@needs_nixl
async def test_cancelled_reads_give_their_slots_back(
    tcp_frontend: Frontend, connect: Connect
) -> None:
    receiver = await connect(tcp_frontend)
    _, metadata = tcp_frontend.send(LARGE)
    for delay in [0.0, 0.0005, 0.002, 0.005, 0.01, 0.015, 0.02, 0.05]:
        task = asyncio.ensure_future(receiver.receive(metadata))
        await asyncio.sleep(delay)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            task.result().release()
        await until(lambda: receiver.free_slots == 2)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@needs_nixl
async def test_all_processes_are_quiet_when_nothing_moves(
    frontend: Frontend, connect: Connect
) -> None:
    receiver = await connect(frontend)
    seed, metadata = frontend.send()
    with await receiver.receive(metadata):
        pass
    frontend.release(seed)
    assert receiver._reading.pid is not None
    pids = (frontend.pid, frontend.server, receiver._reading.pid, os.getpid())
    before = [cpu_seconds(pid) for pid in pids]
    await asyncio.sleep(2)
    used = [(cpu_seconds(pid) - start) / 2 for pid, start in zip(pids, before, strict=True)]
    assert max(used) < 0.5, "a progress thread that spins takes all of a core"


@needs_nixl
async def test_a_frontend_that_dies_in_the_middle_of_a_read(
    frontends: Frontends, connect: Connect
) -> None:
    frontend = frontends.tcp_to_be_killed
    receiver = await connect(frontend)
    _, metadata = frontend.send(LARGE)
    frontend.pause()
    task = asyncio.ensure_future(receiver.receive(metadata))
    await asyncio.sleep(0.2)
    assert not task.done()
    frontend.kill()
    # At once, and not by the deadline, which is another error.
    with pytest.raises(ArenaUnavailableError, match="can't be read"):
        await task
    assert receiver.free_slots == 2
    with pytest.raises(ArenaUnavailableError, match="isn't connected"):
        await receiver.receive(metadata)
    await until(lambda: not receiver._peers._left)


def break_connections(one: int, other: int) -> int:
    """Shut every TCP connection between two processes; gives how many."""
    here = psutil.Process(one).net_connections("tcp")
    there = {c.laddr for c in psutil.Process(other).net_connections("tcp") if c.raddr}
    libc = ctypes.CDLL(None, use_errno=True)
    broken = 0
    process = os.pidfd_open(one)
    for connection in here:
        if connection.raddr not in there:
            continue
        descriptor = libc.syscall(_PIDFD_GETFD, process, connection.fd, 0)
        with contextlib.suppress(OSError):  # NIXL closed it meanwhile, with another
            with socket.socket(fileno=descriptor) as theirs:
                theirs.shutdown(socket.SHUT_RDWR)
            broken += 1
    os.close(process)
    return broken


@needs_nixl
async def test_a_connection_that_breaks_is_made_anew(
    tcp_frontend: Frontend, connect: Connect
) -> None:
    receiver = await connect(tcp_frontend)
    seed, metadata = tcp_frontend.send(LARGE)
    with await receiver.receive(metadata) as received:
        assert is_image(received.item, seed)
    assert receiver._reading.pid is not None
    assert break_connections(receiver._reading.pid, tcp_frontend.server)
    reads = [receiver.receive(metadata) for _ in range(3)]
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(outcome, ArenaUnavailableError)
    await until(lambda: not receiver._peers._mending)
    for _ in range(3):
        with await receiver.receive(metadata) as received:
            assert is_image(received.item, seed)
    assert not receiver._peers._left


@needs_nixl
async def test_any_item(make_arena: Callable[..., Arena], make_receiver: MakeReceiver) -> None:
    sender = NixlSender(make_arena(), NixlNetwork())
    receiver = make_receiver(NixlNetwork())
    assert sender.offer is not None
    await receiver.attach(sender.offer)
    field = MultiModalFieldConfig.batched("image").field
    for number, data in enumerate(
        [
            torch.randn(300, 40).bfloat16(),
            torch.randn(300, 40).T,
            torch.zeros(0, 5),
            [torch.randn(100), [torch.randn(3), torch.randn(200)]],
            2.5,
            None,
        ]
    ):
        item = MultiModalKwargsItem({"x": MultiModalFieldElem(data=data, field=field)})
        with sender.send(image_hash(number), item) as handle:
            metadata = decode_metadata(encode_metadata(handle.metadata))
            with await receiver.receive(metadata) as received:
                assert same(received.item, item)
    sender.close()


@needs_nixl
def test_an_arena_may_be_closed_after_its_sender(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena()
    sender = NixlSender(arena, NixlNetwork())
    handle = sender.send(image_hash(1), image(1))
    sender.close()
    sender.close()
    arena.close()
    handle.release()


def test_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigurationError, match="install nixl"):
        NixlAgent("test", "peer")


def test_a_transfer_is_polled_the_less_the_longer_it_takes() -> None:
    ages = [0.0, 1e-3, 5e-3, 1.0, 60.0]
    pauses = [pause(age) for age in ages]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0
    assert pauses[-1] <= 0.1


@needs_nixl
def test_the_library_is_that_of_pytorchs_cuda_which_is_not_imported(tmp_path: Path) -> None:
    torch_of_cuda = tmp_path / "torch"
    torch_of_cuda.mkdir()
    (torch_of_cuda / "__init__.py").write_text("raise AssertionError('a second for nothing')")
    (torch_of_cuda / "version.py").write_text('cuda = "99.0"')
    made = "from common.transfer.nixl_processes.agent import NixlAgent; NixlAgent('test', 'peer')"
    environment = NixlNetwork().environment(os.environ, [str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", made], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "install nixl with nixl-cu12 or nixl-cu13" in done.stderr
    assert "detected CUDA 99 but nixl-cu99 is not installed" in done.stderr

"""NIXL against somebody on the network, and against the death of its processes.

Over TCP UCX checks neither key nor range: a stranger who reaches the port of an agent reads and
writes all memory of its process. Here he is a real agent without our keys, on loopback.
"""

import asyncio
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from common.errors import ArenaUnavailableError, ConfigurationError, CorruptSegmentError
from common.observability.telemetry import CHILD_RESTARTS
from common.transfer import pages
from common.transfer.arena.arena import Arena
from common.transfer.arena.file import SHARED_MEMORY
from common.transfer.arena.layout import HEADER_SIZE
from common.transfer.checksum import PIECE
from common.transfer.nixl.receiver import NixlReceiver
from common.transfer.nixl.sender import NixlSender
from common.transfer.nixl_processes.messages import FromReader
from common.transfer.nixl_processes.network import NixlNetwork, narrowed, nixl_installed
from common.transfer.shm import ShmReceiver, ShmSender
from tests.open_files import open_files
from tests.unit.common.transfer.items import image, image_hash, is_image
from tests.unit.common.transfer.nixl.ends import Ends
from tests.unit.common.transfer.process import Process
from tests.waiting import until

pytestmark = pytest.mark.skipif(not nixl_installed(), reason="nixl is not installed")

STRANGERS = "tests.unit.common.transfer.stranger_process"
TCP = NixlNetwork(allow_tcp=True)
THIS_HOST = NixlNetwork()

MakeArena = Callable[..., Arena]
MakeEnds = Callable[..., Ends]


@pytest.fixture
async def ends(make_ends: MakeEnds) -> Ends:
    """Connected over TCP."""
    ends = make_ends(TCP)
    await ends.receiver.attach(ends.offer)
    return ends


@pytest.fixture
def stranger(ends: Ends) -> Iterator[Process]:
    environment = {"UCX_TLS": "self,tcp", "UCX_NET_DEVICES": "lo"}
    with Process(
        f"{STRANGERS}:stranger", ends.offer.model_dump(), environment=environment
    ) as process:
        assert process.read() == "connected"
        yield process


def listening(pid: int) -> set[str]:
    """Addresses on which a process can be reached over a network."""
    connections = psutil.Process(pid).net_connections("inet")
    return {
        connection.laddr.ip
        for connection in connections
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    }


def proc(pid: int, name: str) -> str:
    """What the kernel says of a process."""
    return Path(f"/proc/{pid}/{name}").read_text()


def restarts(role: str) -> float:
    return float(CHILD_RESTARTS.labels(role)._value.get())


async def test_without_the_flag_nothing_can_be_reached_over_a_network(
    make_ends: MakeEnds,
) -> None:
    ends = make_ends(THIS_HOST)
    await ends.receiver.attach(ends.offer)
    assert await ends.carry(1)
    assert len(ends.pids) == 2
    assert [listening(pid) for pid in ends.pids] == [set(), set()]


async def test_with_the_flag_only_loopback_is_listened_on(ends: Ends) -> None:
    assert await ends.carry(1)
    assert [listening(pid) for pid in ends.pids] == [{"127.0.0.1"}, {"127.0.0.1"}]


async def test_neither_frontend_nor_worker_has_an_agent(ends: Ends) -> None:
    """So nothing of their memory can be reached, registered or not."""
    assert await ends.carry(1)
    for pid in ends.pids:
        assert "libucp" in proc(pid, "maps")
    assert "libucp" not in proc(os.getpid(), "maps")


async def test_the_processes_hold_nothing_but_what_they_serve(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    ends = make_ends(TCP)
    await ends.receiver.attach(ends.offer)
    for pid in ends.pids:
        environment = proc(pid, "environ")
        assert "secret" not in environment
        assert "PYTHONPATH" in environment
        status = proc(pid, "status")
        assert "NoNewPrivs:\t1" in status
        ours = {target for target in open_files(pid).values() if "mmrouter" in target.name}
        names = {target.name.split(":")[-1] for target in ours}
        assert names <= {ends.arena.offer.name, "mmrouter-nixl (deleted)"}
    assert ends.sender.pid is not None
    for line in proc(ends.sender.pid, "maps").splitlines():
        if ends.arena.offer.name in line:
            assert line.split()[1].startswith("r-"), "mapped for reading only"


def test_a_confined_process_reaches_no_files_and_no_processes(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("secret")
    with Process(f"{STRANGERS}:confined", str(secret), os.getpid()) as process:
        done, able = process.read()
    if not done:
        pytest.skip("this kernel has no Landlock")
    assert able in ([], ["signal"]), "signals only where Landlock is older than version 6"


async def test_a_stranger_reads_what_is_served_and_nothing_of_the_frontend(
    ends: Ends, stranger: Process
) -> None:
    """That the arena can be read is what the flag costs, and the security page says so."""
    metadata = ends.send(7)
    there = ends.offer.address + metadata.offset
    read = bytes.fromhex(stranger.ask(["READ", there, 64]))
    assert read == bytes(ends.arena.memory[metadata.offset : metadata.offset + 64])
    # An address of this process, which is the frontend, is nothing or other bytes there.
    marker = bytearray(b"a secret of the frontend " * 4)
    address = pages.address_of(memoryview(marker))
    answer = stranger.ask(["READ", address, len(marker)])
    assert bytes(marker).hex() not in answer


async def test_what_a_stranger_writes_changes_nothing(ends: Ends, stranger: Process) -> None:
    metadata = ends.send(7)
    shm = ShmReceiver()
    await shm.attach(ends.arena.offer)
    held = ShmSender(ends.arena).send_held(image_hash(7))
    assert held is not None
    before, former = bytes(ends.arena.memory), ends.offer.agent
    started = restarts("nixl_server")
    # The kernel ends the process that serves, since it may only read there.
    there = ends.offer.address + metadata.offset + HEADER_SIZE
    assert stranger.ask(["WRITE", there, 64]).startswith("failed")
    assert bytes(ends.arena.memory) == before
    assert before == (SHARED_MEMORY / ends.arena.offer.name).read_bytes()
    with await shm.receive(held.metadata) as received:
        assert is_image(received.item, 7)
    await ends.served_again(former)
    assert restarts("nixl_server") > started
    assert await ends.carry(7)
    await shm.close()


class Device(NixlNetwork):
    """As if TCP were a device that registers no memory but what can be written."""

    @property
    def registers_for_writing(self) -> bool:
        return True


async def test_where_memory_must_be_writable_a_stranger_writes_to_nobodys_truth(
    make_ends: MakeEnds,
) -> None:
    ends = make_ends(Device(allow_tcp=True))
    own = ends.sender._own
    assert own is not None
    await ends.receiver.attach(ends.offer)
    leased = ShmSender(ends.arena).send(image_hash(7), image(7))
    metadata = ends.send(7)
    assert await ends.carry(7)
    before = bytes(ends.arena.memory)
    environment = {"UCX_TLS": "self,tcp", "UCX_NET_DEVICES": "lo"}
    with Process(
        f"{STRANGERS}:stranger", ends.offer.model_dump(), environment=environment
    ) as stranger:
        assert stranger.read() == "connected"
        there = ends.offer.address + metadata.offset + metadata.layout.length - 64
        assert stranger.ask(["WRITE", there, 64]) == "DONE"
    await until(lambda: own.memory[metadata.offset + metadata.layout.length - 1] == 0xEE)
    assert bytes(ends.arena.memory) == before
    with pytest.raises(CorruptSegmentError, match="checksum"):
        await ends.receiver.receive(metadata)
    leased.release()


async def test_a_read_of_a_low_address_ends_nothing_but_the_process_that_serves(
    ends: Ends, stranger: Process
) -> None:
    assert await ends.carry(1)
    former, server = ends.offer.agent, ends.sender.pid
    assert stranger.ask(["READ", 1 << 12, 64]).startswith("failed")
    await ends.served_again(former)
    assert ends.sender.pid != server
    assert await ends.carry(1)
    assert await ends.carry(2)


async def test_bytes_that_others_wrote_are_found_out(ends: Ends) -> None:
    metadata = ends.send(7)
    assert await ends.carry(7)
    at = metadata.offset + metadata.layout.length - 1
    ends.arena.memory[at] ^= 1
    with pytest.raises(CorruptSegmentError, match="checksum"):
        await ends.receiver.receive(metadata)
    ends.arena.memory[at] ^= 1
    assert await ends.carry(7)


async def test_bytes_that_others_write_where_they_arrive_are_found_out(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = ends.send(7)
    heard = ends.link._heard

    def overwritten(message: FromReader) -> object:
        for slot in (0, PIECE):
            ends.landing_memory[slot + 1000] ^= 1
        return heard(message)

    monkeypatch.setattr(ends.link, "_heard", overwritten)
    with pytest.raises(CorruptSegmentError, match="checksum"):
        await ends.receiver.receive(metadata)


async def test_what_is_written_after_the_check_changes_nothing(ends: Ends) -> None:
    with await ends.receive(7) as received:
        ends.landing_memory[:] = bytes(ends.landing.size)
        assert is_image(received.item, 7)


async def test_an_item_under_anothers_name_or_generation_is_found_out(ends: Ends) -> None:
    """The checksum is of these, too, and keyed: only the frontend can make one."""
    seven, eight = ends.send(7), ends.send(8)
    mixed = seven.model_copy(update={"offset": eight.offset, "generation": eight.generation})
    with pytest.raises(CorruptSegmentError):
        await ends.receiver.receive(mixed)
    other = ends.offer.model_copy(update={"checksum_key": "00" * 32, "agent": ends.offer.agent})
    ends.receiver._peers._offers[ends.offer.agent] = other
    with pytest.raises(CorruptSegmentError, match="checksum"):
        await ends.receiver.receive(seven)


async def test_a_checksum_is_computed_once_for_an_item(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the event loop, and not for an item that is leased again."""
    ShmSender(ends.arena).send(image_hash(1), image(1)).release()
    assert ends.sender.send_held(image_hash(1)) is None, "it would have to be computed"
    ends.sender.send(image_hash(1), image(1)).release()
    monkeypatch.setattr("common.transfer.nixl.sender.checksum", None)
    again = ends.sender.send_held(image_hash(1))
    assert again is not None
    again.release()


async def test_a_reading_process_that_is_killed_comes_back(ends: Ends) -> None:
    metadata = ends.send(7)
    pid = ends.receiver._reading.pid
    assert pid is not None
    for _ in range(2):
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ArenaUnavailableError):
            await ends.receiver.receive(metadata)
        await until(lambda: ends.offer.agent in ends.receiver._peers._offers)
        with await ends.receiver.receive(metadata) as received:
            assert is_image(received.item, 7)
        assert ends.receiver._reading.pid != pid
        pid = ends.receiver._reading.pid
        assert pid is not None
    assert ends.receiver.free_slots == 2


async def test_a_serving_process_that_is_killed_comes_back(make_ends: MakeEnds) -> None:
    ends = make_ends(THIS_HOST)
    await ends.receiver.attach(ends.offer)
    assert ends.sender.pid is not None
    former = ends.offer.agent
    os.kill(ends.sender.pid, signal.SIGKILL)
    await until(lambda: ends.sender.offer is None or ends.offer.agent != former)
    if ends.sender.offer is None:
        assert ends.sender.send_held(image_hash(7)) is None
        with suppress(ArenaUnavailableError):  # or it is back already
            ends.sender.send(image_hash(7), image(7)).release()
    await ends.served_again(former)
    assert await ends.carry(7)
    assert ends.arena.statistics().leases == 1


async def test_slots_that_all_hang_are_freed_by_force(make_ends: MakeEnds) -> None:
    """A frontend that hangs must not take NIXL from the others."""
    ends = make_ends(TCP)
    await ends.receiver.attach(ends.offer)
    ends.receiver._peers.deadline = 0.3
    assert ends.sender.pid is not None
    os.kill(ends.sender.pid, signal.SIGSTOP)
    metadata = ends.send(7)
    reads = [ends.receiver.receive(metadata) for _ in range(2)]
    await asyncio.gather(*reads, return_exceptions=True)
    await until(lambda: ends.receiver.free_slots == 2)
    os.kill(ends.sender.pid, signal.SIGCONT)
    ends.receiver._peers.deadline = 20.0
    # UCX ends a process that finds its reader gone in the middle of a read.
    former = ends.offer.agent
    with suppress(ArenaUnavailableError):
        await ends.receiver.attach(ends.offer)
    await ends.served_again(former)
    assert await ends.carry(7)


async def test_a_serving_process_that_strangers_filled_with_connections_is_replaced(
    ends: Ends,
) -> None:
    """UCX stops listening when it can't accept one, and no worker could connect any more."""
    former, server = ends.offer.agent, ends.sender.pid
    assert server is not None
    few = psutil.Process(server).num_fds() + 8
    resource.prlimit(server, resource.RLIMIT_NOFILE, (few, few))
    ports = [
        connection.laddr.port
        for connection in psutil.Process(server).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    with ExitStack() as strangers:
        for _ in range(32):
            with suppress(OSError):  # once it doesn't listen any more
                strangers.enter_context(socket.create_connection(("127.0.0.1", ports[0])))
        await until(lambda: ends.sender.pid not in (None, server))
    await ends.served_again(former)
    assert await ends.carry(7)


async def test_slots_of_reads_that_hang_and_were_given_up_are_freed_by_force(
    make_ends: MakeEnds,
) -> None:
    """Nobody waits for them, so nobody would see that they are late."""
    ends = make_ends(TCP)
    await ends.receiver.attach(ends.offer)
    metadata = ends.send(7)
    ends.receiver._peers.deadline = 3.0
    assert ends.sender.pid is not None
    former, reader = ends.offer.agent, ends.receiver._reading.pid
    os.kill(ends.sender.pid, signal.SIGSTOP)
    reads = [asyncio.create_task(ends.receiver.receive(metadata)) for _ in range(2)]
    await until(lambda: ends.receiver.free_slots == 0)
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    await until(lambda: ends.receiver.free_slots == 2)
    await until(lambda: ends.receiver._reading.pid not in (None, reader))
    os.kill(ends.sender.pid, signal.SIGKILL)
    ends.receiver._peers.deadline = 20.0
    await ends.served_again(former)
    assert await ends.carry(7)


@pytest.mark.parametrize("which", [0, 1], ids=["serving", "reading"])
async def test_a_process_that_does_not_answer_is_replaced(
    make_ends: MakeEnds, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """Or nothing would ever go over NIXL again."""
    monkeypatch.setattr("common.transfer.nixl.process.SILENCE_S", 1.0)
    ends = make_ends(THIS_HOST)
    await ends.receiver.attach(ends.offer)
    assert await ends.carry(7)
    former, pid = ends.offer.agent, ends.pids[which]
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: len(ends.pids) == 2 and ends.pids[which] != pid)
    if which == 0:
        await ends.served_again(former)
    await until(lambda: ends.offer.agent in ends.receiver._peers._offers)
    assert await ends.carry(7)


def test_processes_end_with_the_one_that_started_them() -> None:
    with Process("tests.unit.common.transfer.frontend_process:frontend", "nixl", 1 << 20) as one:
        assert one.read() is None
        server = psutil.Process(int(one.ask(["offer", 0])[0]))
        os.kill(server.pid, signal.SIGSTOP)  # so that it can't end by itself
        one.kill()
        server.wait(60)


async def test_nothing_is_started_before_it_is_needed() -> None:
    receiver = NixlReceiver(THIS_HOST)
    assert receiver._reading.pid is None
    await receiver.close()
    await receiver.close()
    with pytest.raises(ArenaUnavailableError, match="shut down"):
        await receiver.start()


async def test_a_start_that_nobody_waits_for_leaves_nothing_behind() -> None:
    receiver = NixlReceiver(THIS_HOST)
    starting = asyncio.create_task(receiver.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await receiver.close()
    assert receiver._reading.pid is None


async def stopped_at_its_start() -> int:
    """Stop the next process for NIXL before it is ready."""
    stopped: list[int] = []

    def stop() -> bool:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if any("common.transfer.nixl_" in each for each in child.cmdline()):
                    child.suspend()
                    stopped.append(child.pid)
        return bool(stopped)

    await until(stop)
    return stopped[0]


async def test_who_closes_does_not_wait_for_a_process_that_hangs_at_its_start(
    make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.transfer.nixl.process.START_S", 3600.0)
    receiver = NixlReceiver(THIS_HOST)
    starting = asyncio.create_task(receiver.start())
    pid = await stopped_at_its_start()
    async with asyncio.timeout(60):
        await receiver.close()
        await asyncio.gather(starting, return_exceptions=True)
    assert not psutil.pid_exists(pid)
    given_up = threading.Event()
    sending = asyncio.create_task(
        asyncio.to_thread(NixlSender, make_arena(), THIS_HOST, given_up=given_up.is_set)
    )
    pid = await stopped_at_its_start()
    given_up.set()
    async with asyncio.timeout(60):
        with pytest.raises(ConfigurationError, match="shut down"):
            await sending
    assert not psutil.pid_exists(pid)


def test_what_cannot_be_had_is_said(make_arena: MakeArena) -> None:
    with pytest.raises(ConfigurationError, match="can't be used"):
        NixlSender(make_arena(), NixlNetwork(interface="none-such0"))


@pytest.mark.parametrize(
    ("network", "transports", "device"),
    [
        (NixlNetwork(), "self,posix,cma", "lo"),
        (NixlNetwork("lo"), "self,posix,cma", "lo"),
        (NixlNetwork(None, allow_tcp=True), "self,tcp", "lo"),
        (NixlNetwork("mlx5_0:1"), "self,ib", "mlx5_0:1"),
        (NixlNetwork("eth0", allow_tcp=True), "self,ib,tcp", "eth0"),
        (NixlNetwork("mlx5_0:1", narrowed_to=narrowed("rc, dc")), "self,rc,dc", "mlx5_0:1"),
        (NixlNetwork("mlx5_0:1", narrowed_to=narrowed("rc,cuda_copy")), "self,rc", "mlx5_0:1"),
        (NixlNetwork(narrowed_to=narrowed("all")), "self,posix,cma", "lo"),
    ],
)
def test_networks(network: NixlNetwork, transports: str, device: str) -> None:
    given = {"UCX_TLS": "all", "UCX_NET_DEVICES": "eth0", "UCX_X": "1", "VLLM_API_KEY": "secret"}
    environment = network.environment(given, ["/a", "/b"])
    assert environment["UCX_TLS"] == f"{transports},cuda_copy", "NIXL refuses to start beside GPUs"
    assert environment["UCX_NET_DEVICES"] == device
    assert environment["UCX_X"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == "", "UCX finds no device to open"
    assert environment["PYTHONPATH"] == "/a:/b"
    assert "VLLM_API_KEY" not in environment


def test_only_within_a_host_is_it_known_who_can_write_to_memory_that_is_read_to() -> None:
    assert not THIS_HOST.leaves_user
    assert not NixlNetwork("lo").leaves_user
    assert TCP.leaves_user
    assert NixlNetwork("mlx5_0:1").leaves_user
    assert NixlNetwork("eth0", allow_tcp=True, narrowed_to=("tcp",)).leaves_user
    assert not NixlNetwork(narrowed_to=("posix", "cuda_copy")).leaves_user


@pytest.mark.parametrize("ucx_tls", ["tcp", "self,tcp", "rc", "^cma", "sysv", "sm,tcp"])
def test_ucx_tls_allows_nothing_that_the_flags_do_not(ucx_tls: str) -> None:
    with pytest.raises(ConfigurationError, match="UCX_TLS names"):
        NixlNetwork(narrowed_to=narrowed(ucx_tls)).transports()

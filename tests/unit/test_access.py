"""Strangers at the sockets of a fleet that has a key: they get nothing, others go on."""

import asyncio
import contextlib
import pickle
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory, KVEventBatch
from zmq.utils import z85

from backend_worker.args import parse
from backend_worker.engine.config import with_our_defaults
from backend_worker.kv_events.event_publisher import (
    FleetEventPublisher,
    FleetEventsConfig,
    fleet_events,
)
from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.errors import ConfigurationError, WorkerLostError
from common.fleet_key import FleetKey, KeyPair, new
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import REFUSED_CONNECTIONS
from common.request_plane import fleet_sockets
from common.request_plane.fleet_sockets import frontend_context
from common.request_plane.loop_socket import FRAME_LIMIT, Frame
from common.request_plane.protocol import PROTOCOL_VERSION, Hello, Ping, ToFrontend
from common.request_plane.wire import Codec
from common.transfer.transports import TransferMode, receivers
from frontend.router.events.subscriber import ZmqFeeds
from frontend.router.inputs import EventSource
from frontend.workers import link as worker_link
from frontend.workers.link import WorkerLink
from frontend.workers.media_sender import MediaSender
from tests.fakes.cards import make_card
from tests.fakes.engine import ScriptedEngine, no_rendering
from tests.fakes.kv_events import stored
from tests.fakes.listener import Listener
from tests.waiting import until


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    new(tmp_path / "fleet.key")
    return tmp_path / "fleet.key"


@pytest.fixture
def key(key_file: Path) -> FleetKey:
    return FleetKey.read(key_file)


@pytest.fixture
async def service(key: FleetKey) -> AsyncIterator[WorkerService]:
    service = WorkerService(
        ScriptedEngine(),
        MediaReceiver(receivers(no_rendering)),
        WorkerId("w0"),
        Incarnation("i0"),
        "tcp://127.0.0.1:0",
        key,
    )
    serving = asyncio.create_task(service.run())
    yield service
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await service.close()


async def check_it_serves(service: WorkerService, key: FleetKey | None) -> None:
    """Open a link as a frontend with this key does. Raises what it raises."""
    context = frontend_context(key)
    card = make_card(request_endpoint=service.endpoint)
    link = WorkerLink(card, context, Incarnation("f"), lambda status: None)
    media_sender = MediaSender(None, TransferMode.AUTO)
    try:
        await link.open(media_sender.offer())
        await link.close()
    finally:
        media_sender.close()
        context.destroy(linger=0)


def another(tmp_path: Path) -> FleetKey:
    new(tmp_path / "another.key")
    return FleetKey.read(tmp_path / "another.key")


def pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def refused() -> float:
    return REFUSED_CONNECTIONS.labels("request plane")._value.get()


def test_what_is_made_up_for_strangers_is_a_key() -> None:
    assert len(z85.decode(pair().secret)) == 32


async def test_a_frontend_with_the_key_is_served(service: WorkerService, key: FleetKey) -> None:
    await check_it_serves(service, key)


@pytest.mark.parametrize(
    "stranger", ["no key", "another key", "knows the worker's public key", "has the worker's key"]
)
async def test_a_stranger_gets_nothing_and_others_are_served(
    service: WorkerService,
    key: FleetKey,
    stranger: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "SESSION_TIMEOUT_S", 1.0)
    theirs = {
        "no key": None,
        "another key": another(tmp_path),
        "knows the worker's public key": FleetKey(KeyPair(key.worker.public, b""), pair(), b""),
        "has the worker's key": FleetKey(key.worker, key.worker, b""),
    }[stranger]
    before = refused()
    with pytest.raises(WorkerLostError, match="did not answer"):
        await check_it_serves(service, theirs)
    assert service._sessions == {} and not service._asides
    await until(lambda: refused() > before)
    await check_it_serves(service, key)


async def try_to_send(stranger: zmq.asyncio.Socket, frames: Sequence[Frame]) -> None:
    """A socket that was refused already has nobody to send to, and would wait for ever."""
    with contextlib.suppress(zmq.Again):
        await stranger.send_multipart(frames, flags=zmq.NOBLOCK)


async def test_messages_of_a_stranger_are_never_read(service: WorkerService) -> None:
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    context = zmq.asyncio.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(service.endpoint)
        for message in (Hello(PROTOCOL_VERSION, Incarnation("x"), b"{}"), Ping()):
            await try_to_send(stranger, codec.encode(message))
        assert not await stranger.poll(500)
    assert service._sessions == {}
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 10_000,
        b"\xff" * 10_000,
        b"\x01\x00" * 50,  # ZMTP 1.0: no security at all
        b"\xff" + bytes(8) + b"\x7f\x01\x05" + bytes(100),  # ZMTP 2.0
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x04\xff" * 200,
        b"",
    ],
    ids=["http", "zeros", "ones", "zmtp1", "zmtp2", "null", "curve", "nothing"],
)
async def test_garbage_on_the_port_gets_nothing(
    service: WorkerService, key: FleetKey, garbage: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", _port(service.endpoint))
    answer = b""
    async with asyncio.timeout(60):
        with contextlib.suppress(OSError):  # cut off before we had ended
            writer.write(garbage)
            await writer.drain()
            writer.write_eof()
            answer = await reader.read()
    # At most ZMTP's greeting, which says no more than that this is ZeroMQ.
    assert len(answer) <= 64
    writer.close()
    assert service._sessions == {}
    await check_it_serves(service, key)


@pytest.fixture
def handshake_ms(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(fleet_sockets, "HANDSHAKE_MS", request.param)


@pytest.mark.parametrize("handshake_ms", [600_000], indirect=True)
async def test_a_stranger_has_no_large_frame_taken(
    handshake_ms: None, service: WorkerService, key: FleetKey
) -> None:
    """ZeroMQ takes its memory before the peer has shown a key, and waits for the rest."""
    for length in (FRAME_LIMIT + 1, 4 << 30):
        reader, writer = await asyncio.open_connection("127.0.0.1", _port(service.endpoint))
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)
        writer.write(greeting + b"\x06" + length.to_bytes(8, "big") + b"x" * 1000)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                assert len(await reader.read()) <= 64
        writer.close()
    await check_it_serves(service, key)


@pytest.mark.parametrize("handshake_ms", [500], indirect=True)
async def test_a_stranger_who_says_nothing_holds_no_connection(
    handshake_ms: None, service: WorkerService, key: FleetKey
) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", _port(service.endpoint)) for _ in "abc"]
    async with asyncio.timeout(20):  # ZeroMQ's own limit is longer
        for reader, _ in silent:
            assert len(await reader.read()) <= 64
    for _, writer in silent:
        writer.close()
    await check_it_serves(service, key)


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


async def test_a_false_worker_learns_nothing(
    key: FleetKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "SESSION_TIMEOUT_S", 1.0)
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        while data := await reader.read(1000):
            heard.extend(data)
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    context = frontend_context(key)
    card = make_card(request_endpoint=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    link = WorkerLink(card, context, Incarnation("our-name"), lambda status: None)
    with pytest.raises(WorkerLostError):
        await link.open(b"our-offer")
    context.destroy(linger=0)
    server.close()
    assert b"our-name" not in heard and b"our-offer" not in heard


class Publishing:
    """An engine's publisher with a key."""

    def __init__(self, config: FleetEventsConfig) -> None:
        # As the engine process gets it, and makes a publisher of it.
        arrived = pickle.loads(pickle.dumps(config))
        publisher = EventPublisherFactory.create(arrived)
        assert isinstance(publisher, FleetEventPublisher)
        bound = publisher.get_publisher_config()
        self.publisher = publisher
        self.source = EventSource(0, bound.endpoint, bound.replay_endpoint)

    def publish(self, numbers: range) -> None:
        for number in numbers:
            self.publisher.publish(KVEventBatch(ts=time.time(), events=[stored(number)]))


@pytest.fixture
def publishing(
    key: FleetKey, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Publishing]:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    args = parse(["--model", "m"])
    config = fleet_events(
        with_our_defaults(args.engine, args.engine_given).kv_events_config, key, key_file
    )
    assert isinstance(config, FleetEventsConfig)
    publishing = Publishing(config)
    yield publishing
    publishing.publisher.shutdown()


async def test_events_reach_a_frontend_with_the_key_whole_and_in_order(
    publishing: Publishing, key: FleetKey
) -> None:
    feeds = ZmqFeeds(silence_s=0.2, replay_timeout_s=5.0, key=key)
    publishing.publish(range(1_500))
    listener = Listener(feeds, publishing.source)
    listener.subscriber.start()
    await listener.until(lambda: listener.exact() and listener.held(*range(1_500)) == 1_500)
    publishing.publish(range(1_500, 3_000))
    await listener.until(lambda: listener.held(*range(3_000)) == 3_000)
    statistics = listener.subscriber.statistics()[0]
    # A gap is no loss: what a burst leaves out on a busy machine is asked for again.
    assert (statistics.losses, statistics.malformed) == (0, {})
    assert listener.subscriber._lines[0].stream._progress.next == 3_000
    await listener.subscriber.close()
    feeds.close()


@pytest.mark.parametrize("stranger", ["no key", "another key", "knows the public key"])
async def test_events_reach_nobody_else(
    publishing: Publishing, key: FleetKey, stranger: str, tmp_path: Path
) -> None:
    theirs = {
        "no key": None,
        "another key": another(tmp_path),
        "knows the public key": FleetKey(KeyPair(key.worker.public, b""), pair(), b""),
    }[stranger]
    context = frontend_context(theirs)
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    live.subscribe(b"")
    live.connect(publishing.source.endpoint)
    assert publishing.source.replay_endpoint is not None
    replay.connect(publishing.source.replay_endpoint)
    replay.setsockopt(zmq.LINGER, 0)
    publishing.publish(range(5))
    await try_to_send(replay, [b"", bytes(8)])
    for _ in range(5):
        publishing.publish(range(5))
        assert not await live.poll(100)
    assert not await replay.poll(100)
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("flags", "host_ip"),
    [
        (["--kv-events-config", '{"enable_kv_cache_events": true}'], "127.0.0.1"),
        ([], "10.0.0.5"),
    ],
)
def test_events_that_leave_the_host_need_a_key(
    flags: list[str], host_ip: str, key: FleetKey, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", host_ip)
    args = parse(["--model", "m", *flags])
    config = with_our_defaults(args.engine, args.engine_given).kv_events_config
    with pytest.raises(ConfigurationError, match="fleet-key-file"):
        fleet_events(config, None, None)
    assert isinstance(fleet_events(config, key, key_file), FleetEventsConfig)


def test_events_on_loopback_or_off_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    args = parse(["--model", "m"])
    config = with_our_defaults(args.engine, args.engine_given).kv_events_config
    unkeyed = fleet_events(config, None, None)
    assert isinstance(unkeyed, FleetEventsConfig)
    assert not unkeyed.key_file
    one = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://127.0.0.1:5557"
    )
    ported = fleet_events(one, None, None)
    assert ported is not None and ported.replay_endpoint, "frontends ask there for what they missed"
    assert fleet_events(None, None, None) is None

from pathlib import Path

import pytest
import zmq

from common.errors import CardKeyError, ConfigurationError
from common.fleet_key import FleetKey, new
from common.request_plane.fleet_sockets import (
    check_bind,
    check_card,
    connect,
    leaves_host,
)
from tests.fakes.cards import make_card


def make_key(path: Path) -> FleetKey:
    new(path)
    return FleetKey.read(path)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:0", "tcp://127.8.9.1:5", "tcp://[::1]:5", "tcp://localhost:*", "ipc:///x"],
)
def test_loopback_needs_no_key(endpoint: str) -> None:
    assert not leaves_host(endpoint)
    check_bind(endpoint, None)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:0", "tcp://0.0.0.0:1", "tcp://10.0.0.5:1", "tcp://[::]:1", "tcp://eth0:1",
     "tcp://worker-3:1", "nonsense", "tcp://"],
)  # fmt: skip
def test_everything_else_needs_one(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="--fleet-key-file"):
        check_bind(endpoint, None)
    check_bind(endpoint, make_key(tmp_path / "key"))


def test_cards_of_another_key_are_refused_and_both_keys_named(tmp_path: Path) -> None:
    ours, theirs = make_key(tmp_path / "ours"), make_key(tmp_path / "theirs")
    check_card(make_card(fleet_key=ours.fingerprint), ours)
    check_card(make_card(), None)
    with pytest.raises(CardKeyError, match=f"{theirs.fingerprint}.*{ours.fingerprint}"):
        check_card(make_card(fleet_key=theirs.fingerprint), ours)
    with pytest.raises(CardKeyError, match="has no fleet key, this frontend has"):
        check_card(make_card(), ours)
    with pytest.raises(CardKeyError, match="this frontend has no fleet key"):
        check_card(make_card(fleet_key=ours.fingerprint), None)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://worker-3:1",
        "tcp://localhost:1",
        "tcp://127.0.0.1:0;worker-3:1",
        "tcp://*:1",
        "tcp://",
    ],
)
def test_libzmq_is_given_no_name_to_resolve(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        with pytest.raises(zmq.ZMQError, match="it is no address"):
            connect(socket, endpoint)
        for address in ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://[fe80::1%lo]:1", "ipc:///x"):
            socket.setsockopt(zmq.IPV6, 1)
            connect(socket, address)


def test_a_worker_on_another_host_without_a_key_is_refused() -> None:
    with pytest.raises(CardKeyError, match="leaves this host"):
        check_card(make_card(request_endpoint="tcp://10.0.0.5:5"), None)

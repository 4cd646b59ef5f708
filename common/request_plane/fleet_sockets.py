"""Access control of a fleet's ZMQ sockets: contexts that apply the fleet key to every socket.

With a key all traffic is CURVE: encrypted and mutually authenticated. A peer without the key gets
no answer, whichever protocol it speaks. Without a key sockets are unencrypted and must not leave
loopback.
"""

import ipaddress
import logging
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from common.errors import CardKeyError, ConfigurationError
from common.fleet_key import FleetKey
from common.observability.telemetry import REFUSED_CONNECTIONS
from common.request_plane.card import WorkerCard
from common.request_plane.loop_socket import FRAME_LIMIT

logger = logging.getLogger(__name__)

_DOMAIN = "mmrouter"

_MAX_SOCKETS = 65_536
"""A link takes three. ZeroMQ's own limit is 1,023, and beyond it no worker can be connected to."""

HANDSHAKE_MS = 10_000
"""Time that a peer has to show the key. ZeroMQ's own 30 s let strangers hold all file handles."""

REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events of a socket's monitor that stand for a connection which was refused."""


def frontend_context(key: FleetKey | None) -> zmq.asyncio.Context:
    """Return a context whose sockets connect to workers with the key."""
    _prepare_zero_copy()
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    context.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
    # libzmq starts its threads with the first socket, and aborts the process if it has no file
    # handles for them. Later sockets only fail.
    context.socket(zmq.DEALER).close(linger=0)
    if key is not None:
        context.setsockopt(zmq.CURVE_SERVERKEY, key.worker.public)
        context.setsockopt(zmq.CURVE_PUBLICKEY, key.frontend.public)
        context.setsockopt(zmq.CURVE_SECRETKEY, key.frontend.secret)
    return context


def _prepare_zero_copy() -> None:
    """Create pyzmq's thread and sockets for zero-copy sends before the first such frame: it may be
    fallback media in a fault, when no file handle is left."""
    zmq.Frame(b"", copy=False)


class Gate:
    """Restrict a context's bound sockets to frontends with the key; without one, admit all. Sets
    the key as a default of every socket created from now on."""

    def __init__(self, context: zmq.Context[Any], key: FleetKey | None) -> None:
        self._authenticator: ThreadAuthenticator | None = None
        if key is None:
            return
        # CURVE alone would admit any peer that knows the workers' public key.
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(_DOMAIN, _OneKey(key.frontend.public))
        self._authenticator.start()
        context.setsockopt(zmq.CURVE_SERVER, 1)
        context.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        context.setsockopt(zmq.CURVE_PUBLICKEY, key.worker.public)
        context.setsockopt(zmq.CURVE_SECRETKEY, key.worker.secret)
        # Without the authenticator all peers are refused, instead of admitted.
        context.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        context.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def close(self) -> None:
        """Stop. The caller closes the context afterwards."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class _OneKey:
    """pyzmq's credentials provider: accepts only the frontends' key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


async def count_refusals(monitor: zmq.asyncio.Socket, socket: str) -> None:
    """Count refused connections by a monitor for :data:`REFUSALS`; log the first."""
    first = True
    while True:
        await recv_monitor_message(monitor)
        REFUSED_CONNECTIONS.labels(socket).inc()
        if first:
            first = False
            logger.warning(
                "a connection to the %s without the fleet's key was refused; "
                "further ones are only counted",
                socket,
            )


def leaves_host(endpoint: str) -> bool:
    scheme, _, address = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def connect(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect to the address on a card. Raises zmq.ZMQError, also for the name of a host: libzmq
    resolves names in the thread of all its sockets, which a dead name server holds for 10 s."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "tcp":
        try:
            ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
        except ValueError:
            reason = "it is no address, as every worker publishes"
            raise zmq.ZMQError(zmq.EINVAL, reason) from None
    socket.connect(endpoint)


def check_bind(endpoint: str, key: FleetKey | None) -> None:
    """Raise ConfigurationError for a bind beyond this host without a key."""
    if key is None and leaves_host(endpoint):
        raise ConfigurationError(
            f"{endpoint} leaves this host, where anybody could read prompts and answers: make a "
            "key with `mmrouter fleet-key new PATH` and give it to every worker and "
            "frontend with --fleet-key-file, or stay on 127.0.0.1"
        )


def check_card(card: WorkerCard, key: FleetKey | None) -> None:
    """Raise CardKeyError for a worker with another key, before anything is sent to it."""
    ours = None if key is None else key.fingerprint
    if card.fleet_key != ours:
        raise CardKeyError(
            f"worker {card.worker_id} refused: it {_has(card.fleet_key)}, this frontend "
            f"{_has(ours)}; start both with the same --fleet-key-file"
        )
    endpoints = [card.request_endpoint]
    for source in card.kv_event_sources:
        endpoints += [source.endpoint, source.replay_endpoint or "inproc://none"]
    for endpoint in endpoints:
        if key is None and leaves_host(endpoint):
            raise CardKeyError(
                f"worker {card.worker_id} refused: {endpoint} leaves this host, and without "
                "--fleet-key-file prompts and answers could be read on the way"
            )


def _has(fingerprint: str | None) -> str:
    return "has no fleet key" if fingerprint is None else f"has the fleet key {fingerprint}"

"""The one file that touches how vLLM publishes KV events: on sockets with the fleet key.

vLLM's publisher runs in the engine's process and knows no encryption. Ours is the same
one over a context of its own, which puts the key on its sockets; numbering, replay and
buffers stay vLLM's.
"""

import dataclasses
import os
from pathlib import Path
from typing import Literal

import zmq
from vllm.config import KVEventsConfig, config
from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher

from common.errors import ConfigurationError
from common.fleet_key import FleetKey
from common.fleet_sockets import Gate, check_bind

_NAME = "mmrouter"


@config
class KeyedEventsConfig(KVEventsConfig):
    """vLLM's settings of KV events, and the file with the key.

    An engine process that unpickles it imports this module, and so knows the publisher.
    """

    publisher: Literal["null", "zmq", "mmrouter"] = "mmrouter"
    key_file: str = ""


class KeyedEventPublisher(ZmqEventPublisher):
    """vLLM's publisher, on sockets that answer only those who have the key."""

    def __init__(self, data_parallel_rank: int, *, key_file: str, **settings: object) -> None:
        """
        Args:
            settings: of vLLM's publisher.

        Raises:
            ConfigurationError: the key can't be read.
        """
        self._key = FleetKey.read(Path(key_file))
        super().__init__(data_parallel_rank, **settings)

    def _socket_setup(self) -> None:
        # vLLM's own context is shared by sockets that must stay plain.
        self._ctx: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gate(self._ctx, self._key)
        super()._socket_setup()

    def shutdown(self) -> None:
        """Stop publishing and free the ports."""
        super().shutdown()
        self._gate.close()
        self._ctx.destroy(linger=0)


EventPublisherFactory.register_publisher(_NAME, KeyedEventPublisher)


def secured(
    events: KVEventsConfig | None, key: FleetKey | None, key_file: Path | None
) -> KVEventsConfig | None:
    """The settings of KV events as a worker with or without a key may use them.

    Raises:
        ConfigurationError: they leave this host and there is no key, or the publisher is
            a third party's, which has none.
    """
    if events is None or not events.enable_kv_cache_events or events.publisher == "null":
        return events
    for endpoint in (events.endpoint, events.replay_endpoint):
        if endpoint is not None:
            check_bind(_bound(endpoint), key)
    if key_file is None:
        return events
    if events.publisher != "zmq":
        raise ConfigurationError(
            f"the KV event publisher {events.publisher!r} knows no fleet key; use zmq"
        )
    settings = dataclasses.asdict(events) | {"publisher": _NAME}
    return KeyedEventsConfig(**settings, key_file=str(key_file.absolute()))


def _bound(endpoint: str) -> str:
    """Where vLLM will bind an endpoint: a free port means this node's own address."""
    if endpoint == "tcp://*:0":
        return f"tcp://{os.environ.get('VLLM_HOST_IP', '*')}:0"
    return endpoint

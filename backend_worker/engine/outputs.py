"""The socket by which an engine's outputs come, read as those of the request plane are.

vLLM reads it by pyzmq's own class for asyncio, which took a third of what a worker's process did
for a step of its engine.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import zmq
import zmq.asyncio
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine import core_client

from common.request_plane.loop_socket import LoopReader


class EngineOutputs(zmq.asyncio.Socket):
    """To vLLM a socket as any other. One task reads it, and nobody sends."""

    _loop_reader: LoopReader | None = None

    def recv_multipart(  # type: ignore[override] # it has one signature for each kind of frames
        self, *_: object, **__: object
    ) -> Coroutine[Any, Any, list[zmq.Frame]]:
        """The frames of the next message. vLLM asks for them without a copy."""
        if self._loop_reader is None:
            self._loop_reader = LoopReader(zmq.Socket.shadow(self))
        return self._next(self._loop_reader)

    async def _next(self, reader: LoopReader) -> list[zmq.Frame]:
        """With a turn for others before it. Where an engine is ahead of what its outputs cost here,
        neither this nor vLLM's queue ever waits, and the worker would be silent until it caught up.
        """
        if reader.does_not_wait:
            await asyncio.sleep(0)
        return await reader.receive()

    def close(self, linger: int | None = None) -> None:
        """Close it. Whoever waits is cancelled, as pyzmq does it."""
        if self._loop_reader is not None and not self.closed:
            self._loop_reader.stop()
        super().close(linger)


class _Context:
    """Makes what vLLM makes of a context."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context

    def socket(self, kind: int) -> zmq.asyncio.Socket:
        return self._context.socket(kind, socket_class=EngineOutputs)


def install() -> None:
    """Let all engines of this process be read so."""
    vars(core_client)["make_zmq_socket"] = _make_zmq_socket


def _make_zmq_socket(context: Any, path: str, kind: int, *args: Any, **options: Any) -> Any:
    if kind == zmq.PULL and isinstance(context, zmq.asyncio.Context):
        context = _Context(context)
    return make_zmq_socket(context, path, kind, *args, **options)

"""Outputs of an engine on the shortest way, from its socket to whoever sends them.

The socket is read as those of the request plane are: pyzmq's own class for asyncio took a third of
what a worker's process did for a step of its engine. vLLM then leaves an output where the task of
its request finds it. To wake that task at each token, through a generator of each layer, takes
longer than to send it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

import zmq
import zmq.asyncio
from vllm.outputs import RequestOutput
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine import core_client
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

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


def _make_zmq_socket(
    context: object, path: str, kind: int, *args: object, **options: object
) -> Any:
    if kind == zmq.PULL and isinstance(context, zmq.asyncio.Context):
        context = _Context(context)
    return make_zmq_socket(context, path, kind, *args, **options)


Take: TypeAlias = Callable[[RequestOutput], bool]
"""Says whether it took an output; otherwise it is left for the task. Raises nothing: an error would
end all requests of the engine."""

_take: Final[ContextVar[Take | None]] = ContextVar("who takes outputs", default=None)


def take_outputs(take: Take) -> None:
    """Who takes the outputs of what this task asks its engine for from now on: all but the last of
    a request, as long as none before it waits for the task."""
    _take.set(take)


class DirectLLM(AsyncLLM):
    """An engine whose outputs are offered to whoever takes them."""

    async def add_request(self, *args: object, **options: object) -> RequestOutputCollector:
        """Return where vLLM leaves the outputs of a request, once the engine has been told."""
        collector = await super().add_request(*args, **options)
        if (take := _take.get()) is not None:
            # vLLM knows this one already.
            collector.__class__ = DirectCollector
            vars(collector)["take"] = take
        return collector


class DirectCollector(RequestOutputCollector):
    """Where vLLM leaves the outputs of a request."""

    take: Take

    def put(self, output: object) -> None:
        """Called for each output, or for the error that ends all of them."""
        if (
            self.output is not None
            or not isinstance(output, RequestOutput)
            or output.finished
            or not self.take(output)
        ):
            super().put(output)

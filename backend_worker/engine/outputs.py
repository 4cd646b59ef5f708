"""Shortest path of outputs: from the engine's socket straight to the sender.

The socket is read like those of the request plane: pyzmq's asyncio class took a third of a worker's
CPU time per engine step. vLLM then wakes the request's task at each token, through a generator per
layer, which costs more than sending it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import cache
from typing import Any, Final, TypeAlias

import zmq
import zmq.asyncio
from vllm.outputs import RequestOutput
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine import core_client
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from backend_worker.engine.sampler_limits import SampledInputs
from common.request_plane.loop_socket import LoopReader


class EngineOutputs(zmq.asyncio.Socket):
    """A socket that vLLM uses as any other. One task reads it, none sends."""

    _loop_reader: LoopReader | None = None

    def recv_multipart(  # type: ignore[override] # it has one signature for each kind of frames
        self, *_: object, **__: object
    ) -> Coroutine[Any, Any, list[zmq.Frame]]:
        """Return the frames of the next message. vLLM asks for them without a copy."""
        if self._loop_reader is None:
            self._loop_reader = LoopReader(zmq.Socket.shadow(self))
        return self._next(self._loop_reader)

    async def _next(self, reader: LoopReader) -> list[zmq.Frame]:
        """Yield to the event loop first if a message is ready. With an engine ahead of its outputs
        neither this nor vLLM's queue ever waits. The worker would be silent until it caught up."""
        if reader.does_not_wait:
            await asyncio.sleep(0)
        return await reader.receive()

    def close(self, linger: int | None = None) -> None:
        """Close the socket and cancel its reader, as pyzmq does."""
        if self._loop_reader is not None and not self.closed:
            self._loop_reader.stop()
        super().close(linger)


class _Context:
    """Context that creates :class:`EngineOutputs` sockets."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context

    def socket(self, kind: int) -> zmq.asyncio.Socket:
        return self._context.socket(kind, socket_class=EngineOutputs)


def install() -> None:
    """Use :class:`EngineOutputs` for all engines of this process."""
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


def take_outputs(take: Take | None) -> None:
    """Set the receiver of outputs for the engine calls of this task. It gets all outputs but a
    request's last, as long as no earlier one waits for the task."""
    _take.set(take)


class DirectLLM(AsyncLLM):
    """AsyncLLM that offers outputs to the receiver set by :func:`take_outputs`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.input_processor = SampledInputs(self.vllm_config, self.renderer)
        self.output_processor.__class__ = DirectOutputs

    async def add_request(self, *args: object, **options: object) -> RequestOutputCollector:
        collector = await super().add_request(*args, **options)
        if (take := _take.get()) is not None:
            # vLLM holds this object already, so its class is changed in place.
            collector.__class__ = DirectCollector
            vars(collector)["take"] = take
        return collector


class DirectOutputs(OutputProcessor):
    """An error in the text or log probabilities of one request ends that request alone. vLLM takes
    it for the end of the engine: tokens without a text ended one after the other.
    """

    def add_request(self, request: Any, *rest: Any, **options: Any) -> None:
        super().add_request(request, *rest, **options)
        state = self.request_states[request.request_id]
        parts: tuple[Any, ...] = state.detokenizer, state.logprobs_processor
        for part, method in zip(parts, ("update", "update_from_output"), strict=True):
            if part is not None:  # it generates, and does not pool
                part.__class__ = _failing_alone(part.__class__, method)
                vars(part)["collector"] = state.queue


@cache
def _failing_alone(kind: Any, method: str) -> Any:
    work = getattr(kind, method)

    def guarded(self: Any, *given: object) -> Any:
        try:
            return work(self, *given)
        except Exception as error:  # noqa: BLE001 # raised where the output is waited for
            self.collector.put(RuntimeError(f"its output can't be read: {error!r}"))
            return None

    return type(kind.__name__, (kind,), {method: guarded})


class DirectCollector(RequestOutputCollector):
    """Collector of a request that offers each output to ``take`` first."""

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

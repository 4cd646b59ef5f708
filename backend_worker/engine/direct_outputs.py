"""Outputs on the shortest way: from where vLLM makes them to whoever sends them.

vLLM leaves an output where the task of its request finds it. To wake that task at each token,
through a generator of each layer, takes longer than to send it.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

Take: TypeAlias = Callable[[RequestOutput], bool]
"""Says whether it took an output; otherwise it is left for the task. Raises nothing: an error would
end all requests of the engine."""

_take: Final[ContextVar[Take | None]] = ContextVar("who takes outputs", default=None)


def take_outputs(take: Take) -> None:
    """Who takes the outputs of what this task asks its engine for from now on: all but the last of
    a request, as long as none before it waits for the task.
    """
    _take.set(take)


class DirectLLM(AsyncLLM):
    """An engine whose outputs are offered to whoever takes them."""

    async def add_request(self, *args: Any, **options: Any) -> RequestOutputCollector:
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

    def put(self, output: Any) -> None:
        """Called for each output, or for the error that ends all of them."""
        if (
            self.output is not None
            or not isinstance(output, RequestOutput)
            or output.finished
            or not self.take(output)
        ):
            super().put(output)

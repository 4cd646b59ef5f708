"""Outputs on the shortest way: from where vLLM makes them to whoever sends them.

vLLM leaves an output where the task of its request finds it. To wake that task at each token,
through a generator of each layer, takes longer than to send it.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from vllm.outputs import RequestOutput
from vllm.v1.engine import async_llm
from vllm.v1.engine.output_processor import RequestOutputCollector

Take: TypeAlias = Callable[[RequestOutput], bool]
"""Says whether it took an output; otherwise it is left for the task. Raises nothing: an error would
end all requests of the engine."""

_take: Final[ContextVar[Take | None]] = ContextVar("who takes outputs", default=None)


def install() -> None:
    """Let all engines of this process ask whoever takes outputs."""
    vars(async_llm)["RequestOutputCollector"] = DirectCollector


def take_outputs(take: Take) -> None:
    """Who takes the outputs of what this task asks its engine for from now on: all but the last of
    a request, as long as none before it waits for the task.
    """
    _take.set(take)


class DirectCollector(RequestOutputCollector):
    """Where vLLM leaves the outputs of a request; made within the task that asks for them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._take = _take.get()

    def put(self, output: Any) -> None:
        """Called for each output, or for the error that ends all of them."""
        if (
            self._take is None
            or self.output is not None
            or not isinstance(output, RequestOutput)
            or output.finished
            or not self._take(output)
        ):
            super().put(output)

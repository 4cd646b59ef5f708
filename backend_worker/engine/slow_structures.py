"""End answers whose structure makes an engine ever slower.

Between two steps an engine has xgrammar make a mask for the next token of each answer with a
structure. An ambiguous grammar of 60 bytes takes longer with each token, without end, and no
request of the engine goes on meanwhile. What a trial at the frontend sees is the beginning only.
"""

import time
from typing import Final

import torch
from vllm.config import StructuredOutputsConfig, VllmConfig, config
from vllm.v1.structured_output import backend_xgrammar

SLOW_S: Final = 0.1
"""CPU seconds of a mask, or of a token, that count. Structures of 128 tools take 0.01 s."""

MAX_SLOW_S: Final = 0.5
"""Sum of these from which an answer ends with an error."""


class WatchedGrammar(backend_xgrammar.XgrammarGrammar):
    """xgrammar's state of one answer, which takes no token once it has been slow for too long."""

    _slow_s = 0.0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Return whether the answer may go on."""
        began = time.thread_time()
        accepted = super().accept_tokens(request_id, tokens)
        self._count(time.thread_time() - began)
        return accepted and self._slow_s <= MAX_SLOW_S

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Make the mask."""
        began = time.thread_time()
        super().fill_bitmask(bitmask, idx)
        self._count(time.thread_time() - began)

    def _count(self, took: float) -> None:
        if took > SLOW_S:
            self._slow_s += took


@config
class WatchedStructuresConfig(StructuredOutputsConfig):
    """vLLM's settings. An engine process that unpickles them imports this module."""


def watch_structures(engine: VllmConfig) -> None:
    """Have the engines of a configuration watch the structures of answers."""
    engine.structured_outputs_config = WatchedStructuresConfig(
        **vars(engine.structured_outputs_config)
    )


vars(backend_xgrammar)["XgrammarGrammar"] = WatchedGrammar

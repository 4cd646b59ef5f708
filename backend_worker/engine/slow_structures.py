"""End requests whose structure makes an engine too slow.

Between two steps an engine has xgrammar make a mask for the next token of each answer with a
structure, and no other request goes on meanwhile. An ambiguous grammar of 60 bytes takes longer
with each token, without end; 64 choices of a structure that takes 0.04 s for each take 2.5 s in
every step. A frontend's trial covers the first tokens of one answer only.
"""

import re
import time
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import torch
from vllm.config import StructuredOutputsConfig, VllmConfig, config
from vllm.v1.structured_output import backend_xgrammar

import backend_worker.engine.vllm_faults  # noqa: F401  # in the engine's process, too

SLOW_S: Final = 0.2
"""CPU seconds of a mask, or of a token, that count: twice what a trial lets pass, since the cores
of a worker may be slower."""

MAX_SLOW_S: Final = 0.5
"""Sum of these from which a request ends with an error."""

MAX_STEP_S: Final = 0.5
"""CPU seconds for all masks of one request in one step, from which it ends as well."""


@dataclass(eq=False)
class _Spent:
    """CPU seconds for the answers of one request, ``step_s`` in the last step."""

    step: int = 0
    step_s: float = 0.0
    slow_s: float = 0.0

    def count(self, took: float, step: int) -> None:
        if step != self.step:
            self.step, self.step_s = step, 0.0
        self.step_s += took
        if took > SLOW_S:
            self.slow_s += took
        if self.step_s > MAX_STEP_S:
            self.slow_s += self.step_s

    @property
    def too_much(self) -> bool:
        return self.slow_s > MAX_SLOW_S


class _Engine:
    """The requests of this process, by the names that frontends gave them, and its steps."""

    def __init__(self) -> None:
        self._requests: WeakValueDictionary[str, _Spent] = WeakValueDictionary()
        self._filling = False
        self._step = 0

    def of(self, request_id: str) -> _Spent:
        """Return the request of an answer, ``choice_request.prompt-attempt-suffix``."""
        name = re.split(r"[.-]", re.sub(r"\A[0-9]+_", "", request_id), maxsplit=1)[0]
        return self._requests.setdefault(name, _Spent())

    def fills(self) -> int:
        """Return the number of the step. One begins with the first mask after a token."""
        if not self._filling:
            self._filling = True
            self._step += 1
        return self._step

    def accepts(self) -> int:
        self._filling = False
        return self._step


_ENGINE: Final = _Engine()


class WatchedGrammar(backend_xgrammar.XgrammarGrammar):
    """xgrammar's state of one answer, which takes no token if its request has been too slow."""

    _spent: _Spent | None = None

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Return whether the answer may go on."""
        self._spent = self._spent or _ENGINE.of(request_id)
        began = time.thread_time()
        accepted = super().accept_tokens(request_id, tokens)
        self._spent.count(time.thread_time() - began, _ENGINE.accepts())
        return accepted and not self._spent.too_much

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """Make the mask."""
        step, spent = _ENGINE.fills(), self._spent
        if spent is not None and spent.too_much:
            bitmask[idx].fill_(-1)  # any token: the answer ends with it
            return
        began = time.thread_time()
        super().fill_bitmask(bitmask, idx)
        if spent is not None:  # the first mask was made by the trial too
            spent.count(time.thread_time() - began, step)


@config
class WatchedStructuresConfig(StructuredOutputsConfig):
    """vLLM's settings. An engine process that unpickles them imports this module."""


def watch_structures(engine: VllmConfig) -> None:
    """Have the engines of a configuration watch the structures of answers."""
    engine.structured_outputs_config = WatchedStructuresConfig(
        **vars(engine.structured_outputs_config)
    )


vars(backend_xgrammar)["XgrammarGrammar"] = WatchedGrammar

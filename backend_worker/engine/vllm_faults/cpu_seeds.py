"""Let requests with a ``seed`` have prompts that an engine on a CPU reads in pieces.

After each piece but the last, vLLM's first model runner takes back what the request's generator
drew, by an offset that generators of CPUs don't have: one prompt longer than a step, with a seed,
ended one engine after the other.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu_input_batch import InputBatch

_add_request = InputBatch.add_request


class RewindingGenerator(torch.Generator):
    """A CPU's generator that goes back to the state in which a step's batch got it."""

    def keep(self) -> None:
        """Remember the state."""
        self._kept = self.get_state()

    def get_offset(self) -> int:
        """Return as much as vLLM takes off."""
        return 4

    def set_offset(self, offset: int) -> None:
        """Go back."""
        self.set_state(self._kept)


def add_request(self: Any, request: Any) -> int:
    """See vLLM's, which calls it for each request that begins or goes on."""
    given = request.generator
    if given is not None and given.device.type == "cpu":
        if not isinstance(given, RewindingGenerator):
            request.generator = RewindingGenerator()
            request.generator.set_state(given.get_state())
        request.generator.keep()
    return _add_request(self, request)


InputBatch.add_request = add_request

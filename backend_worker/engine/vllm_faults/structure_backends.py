"""Compile each answer's structure with the backend that vLLM chose for it.

With ``auto``, vLLM's default, an engine keeps the backend of its first structure for all others.
One schema that only guidance takes had vLLM 0.33 refuse all later ones that xgrammar takes, of all
clients, and vLLM 0.32 all structural tags.
"""

import copy
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output import StructuredOutputManager

_init = StructuredOutputManager.grammar_init


def grammar_init(self: Any, request: Any) -> None:
    """See vLLM's. Raises VLLMValidationError if a step has no mask for both backends: some
    tokenizers have more tokens than their model."""
    if request.structured_output_request is None:
        return
    name = request.sampling_params.structured_outputs._backend
    if not hasattr(self, "of_backends"):
        self.of_backends = {}
    # A thread compiles with the manager's backend, later.
    manager = self.of_backends.setdefault(name, _without_backend(self))
    _init(manager, request)
    if self.backend is None:
        self.backend = manager.backend
    elif manager.backend is not self.backend and _width(manager) != _width(self):
        raise VLLMValidationError(
            f"the structure of the answer is one for {name}, and this engine began with another "
            'backend: ask the operator to set "backend" of --structured-outputs-config'
        )


def _without_backend(manager: Any) -> Any:
    made = copy.copy(manager)
    made.backend = made.backend_name = None
    return made


def _width(manager: Any) -> int:
    return int(manager.backend.allocate_token_bitmask(1).shape[1])


StructuredOutputManager.grammar_init = grammar_init

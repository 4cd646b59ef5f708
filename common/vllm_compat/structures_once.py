"""vLLM's input processor, which reads each structure of answers once.

vLLM reads it for each prompt of a request, in the one thread that all prompts need, in a frontend
and in a worker: 200 prompts with a schema of 8 KB kept a chat waiting for 24 s.
"""

import copy
import hashlib
import threading
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from common.lru import Lru

KEPT_BYTES: Final = 16 << 20

Verdict: TypeAlias = Mapping[str, Any] | str
"""Attributes that vLLM sets if it takes a structure, or its error."""


class ReadingOnce(InputProcessor):
    """Remembers what vLLM said of a structure."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._config = self.vllm_config.structured_outputs_config
        self.structured_outputs_config = None  # vLLM would read each structure again
        self._verdicts: Lru[bytes, Verdict] = Lru(KEPT_BYTES, _size)
        self._lock = threading.Lock()

    def process_inputs(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> EngineCoreRequest:
        """See vLLM's. Sets the attributes of the structure in ``params``."""
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            self._read(params.structured_outputs)
        return super().process_inputs(request_id, prompt, params, *args, **options)

    def _read(self, structure: StructuredOutputsParams) -> None:
        text = repr(vars(structure)).encode("utf-8", "surrogatepass")
        key = hashlib.sha256(text).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._judge(structure)
            with self._lock:
                self._verdicts.put(key, verdict)
        if isinstance(verdict, str):
            raise VLLMValidationError(verdict)
        vars(structure).update(verdict)

    def _judge(self, structure: StructuredOutputsParams) -> Verdict:
        read = copy.copy(structure)
        try:
            SamplingParams(structured_outputs=read).verify(
                self.model_config, None, self._config, self.tokenizer
            )
        except VLLMValidationError as error:
            return str(error)
        before = vars(structure)
        return {name: value for name, value in vars(read).items() if value is not before[name]}


def _size(verdict: Verdict) -> int:
    texts = [verdict] if isinstance(verdict, str) else verdict.values()
    return 1024 + sum(len(text) for text in texts if isinstance(text, str))

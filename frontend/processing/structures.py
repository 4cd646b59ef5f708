"""Structures of answers (JSON schemas, grammars, choices) are tried before anything compiles them.

See :mod:`frontend.bounded.structure_server` for why, and for what a trial is.
"""

import asyncio
import hashlib
import json
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from vllm.config import VllmConfig
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from common.aio.spawn import python_command
from common.errors import OverloadedError, RequestRejectedError
from common.lru import Lru
from frontend.bounded.forks import Bounds
from frontend.bounded.structure_orders import BOUNDS, COMPILES, Structure, Vocabulary
from frontend.bounded.work import BoundedWork
from frontend.request_context import Tenant, current_context

COMMAND: Final = python_command("frontend.bounded.structure_server")

WAIT_S: Final = 30.0
"""Seconds that a request waits for the structures of others."""

KEPT: Final = 4096
"""Structures of which the frontend knows how a trial ended."""

TRIED: Final = ("auto", "xgrammar")
"""Backends of ``--structured-outputs-config`` with which an engine compiles by xgrammar, and what
that refuses by guidance. Others are an operator's choice."""

_Key = bytes


class StructureTrials:
    """Tries each structure once. For one model and one event loop."""

    def __init__(
        self, config: VllmConfig, tokenizer: TokenizerLike | None, bounds: Bounds = BOUNDS
    ) -> None:
        """
        Args:
            bounds: of one trial.
        """
        self._config = config
        self._bounds = bounds
        self._tokenizer = tokenizer
        self._tries = tokenizer is not None and config.structured_outputs_config.backend in TRIED
        self._work = BoundedWork(COMMAND, "structures of answers", WAIT_S, self._vocabulary)
        self._outcomes: Lru[_Key, bool] = Lru(KEPT)
        self._running: dict[_Key, asyncio.Task[bool]] = {}
        # One at a time of each API key, so that one key's keep no other waiting for more than one.
        self._of_tenants: WeakValueDictionary[Tenant, asyncio.Lock] = WeakValueDictionary()

    async def check(self, params: SamplingParams | PoolingParams) -> None:
        """Return if the structure that an answer is to have, if any, may reach vLLM.

        Raises:
            RequestRejectedError: it takes too much to compile.
            OverloadedError: others are being tried.
        """
        structure = structure_of(params) if self._tries else None
        if structure is None:
            return
        key = hashlib.sha256(repr(structure).encode("utf-8", "surrogatepass")).digest()
        compiles = self._outcomes.get(key)
        if compiles is None:
            compiles = await self._tried(key, structure)
        if not compiles:
            most = f"{self._bounds.cpu_s} s of a core or {self._bounds.memory_bytes >> 20} MiB"
            raise RequestRejectedError(
                "the structure of the answer (a JSON schema, a grammar, a regex or choices) takes "
                f"more than {most} to compile, or too long for each token: use fewer optional "
                "parts, repetitions and bounds on lengths"
            )

    def close(self) -> None:
        """End the process."""
        self._work.close()

    async def _tried(self, key: _Key, structure: Structure) -> bool:
        """Requests with the same structure, such as the prompts of a batch, wait for one trial."""
        running = self._running.get(key)
        if running is None:
            running = asyncio.create_task(self._try(key, structure), name="structure")
            self._running[key] = running
            running.add_done_callback(partial(self._done, key))
        return await asyncio.shield(running)

    def _done(self, key: _Key, running: asyncio.Task[bool]) -> None:
        del self._running[key]
        if not running.cancelled():
            running.exception()  # those who waited may have left

    async def _try(self, key: _Key, structure: Structure) -> bool:
        lock = self._of_tenants.setdefault(current_context().tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(WAIT_S):
                await lock.acquire()
        except TimeoutError as error:
            raise OverloadedError(
                "too many structures of answers of this API key are being tried"
            ) from error
        try:
            said = await self._work.ask(structure)
        finally:
            lock.release()
        if said is None:
            raise OverloadedError("the process that tries structures of answers was lost")
        compiles = said == COMPILES
        self._outcomes.put(key, compiles)
        return compiles

    def _vocabulary(self) -> Vocabulary:
        """As an engine makes it, for each kind of tokenizer."""
        backend = XgrammarBackend(
            self._config, self._tokenizer, self._config.model_config.get_vocab_size()
        )
        info = backend.compiler.compile_builtin_json_grammar().tokenizer_info
        return Vocabulary(
            info.serialize_json(),
            backend.disable_any_whitespace,
            falls_back=self._config.structured_outputs_config.backend == "auto",
            bounds=self._bounds,
        )


def structure_of(params: SamplingParams | PoolingParams) -> Structure | None:
    """Return what an engine would compile; None if that is nothing, or always the same."""
    wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
    if wanted is None:
        return None
    if wanted.json is not None:
        return Structure("json", _as_text(wanted.json))
    if wanted.regex is not None:
        return Structure("regex", wanted.regex)
    if wanted.choice is not None:
        return Structure("grammar", choice_as_grammar(wanted.choice))
    if wanted.grammar is not None:
        kind = "lark" if grammar_is_likely_lark(wanted.grammar) else "grammar"
        return Structure(kind, wanted.grammar)
    if wanted.structural_tag is not None:
        return Structure("structural_tag", wanted.structural_tag)
    return None


def _as_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)

"""Trials of structures of answers (JSON schemas, grammars, choices) before any compiler sees them.

See :mod:`frontend.bounded.structure_server` for the reason, and for what a trial is.
"""

import asyncio
import hashlib
import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.entrypoints.generate.base import protocol
from vllm.parser import abstract_parser
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import (
    SamplingParams,
    StructuredOutputsParams,
    check_json_nesting,
)
from vllm.tokenizers import TokenizerLike
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.structured_output.backend_guidance import has_guidance_unsupported_json_features
from vllm.v1.structured_output.backend_xgrammar import (
    XgrammarBackend,
    has_xgrammar_unsupported_json_features,
)
from vllm.v1.structured_output.utils import (
    choice_as_grammar,
    get_outlines_vocabulary,
    grammar_is_likely_lark,
)

from common.aio.processes import python_command
from common.errors import OverloadedError, RequestRejectedError
from common.lru import Lru
from frontend.bounded.forks import Bounds
from frontend.bounded.orders import COMPILES, REFUSED, STRUCTURE_BOUNDS, Structure, Vocabulary
from frontend.bounded.work import BoundedWork
from frontend.client_turns import CHOICES_LIKE_CHATS, ClientShares, ClientTurns
from frontend.request_context import current_context

COMMAND: Final = python_command("frontend.bounded.structure_server")

WAIT_S: Final = 30.0
"""Seconds that a request waits for earlier structures."""

QUICK_S: Final = 1
"""CPU seconds of a first trial. A structure that takes longer has a second one, in another process:
those of one client, of 10 s each, kept all other clients' waiting for 8 s."""

KEPT: Final = 4096
"""LRU limit of remembered outcomes."""

TRIED: Final = ("auto", "xgrammar", "guidance", "outlines")
"""Backends of ``--structured-outputs-config`` whose cost a trial can bound. The one other,
lm-format-enforcer, works in Python between the steps of an engine, token by token."""

FOR_OUTLINES: Final = (
    "the structure of the answer is one that xgrammar does not take, and guidance neither, such as "
    "patternProperties beside properties or several of them: leave these out, or ask the operator "
    'to set "backend" of --structured-outputs-config to outlines'
)

MAX_STEP_S: Final = 0.5
"""CPU seconds for the masks of all choices of one request in one step of an engine, of which each
may be as slow as the slowest that its trial made."""

FEW_S: Final = 0.03
"""CPU seconds for the masks of one request that are not counted with its client's others. With
130,000 tokens any JSON takes 4 to 10 ms, strings with a bound of 100 up to 35, depending on the
machine: a client may be a proxy for many people."""

SHARE_S: Final = 0.25
"""CPU seconds for the masks of all requests of a client in one step, times engines. Eight requests
of 14 choices took an engine 3 s for each token of all its requests."""

CHOICES_AT_ONCE: Final = 256
"""Choices of a request that are counted: vLLM's default of ``--max-num-seqs`` on smaller GPUs. An
engine with more slots ends the request itself, once its masks of one step take too long."""

_Key = bytes


@dataclass
class _Choices:
    """Choices of a request that have a structure, over all of its prompts, and its calls."""

    count: int = 0
    calls: int = 0


class StructureTrials:
    """Tries each structure once. For one model and one event loop."""

    def __init__(
        self, config: VllmConfig, tokenizer: TokenizerLike | None, bounds: Bounds = STRUCTURE_BOUNDS
    ) -> None:
        self._config = config
        self._bounds = bounds
        self._tokenizer = tokenizer
        self._backend = config.structured_outputs_config.backend
        leave_structures_to_trials()
        self._work = self._trials_of(bounds._replace(cpu_s=min(QUICK_S, bounds.cpu_s)))
        self._slow_work = self._trials_of(bounds)
        self._outcomes: Lru[_Key, bytes] = Lru(KEPT)
        self._clients = ClientTurns(1)
        self._masks = ClientShares()

    async def check(self, params: SamplingParams | PoolingParams, engines: int = 1) -> None:
        """Return if an answer's structure, if any, may reach vLLM: once the masks of this client's
        other requests leave time for it, on all ``engines``.

        Raises:
            RequestRejectedError: it costs too much to compile, or no trial can tell.
            OverloadedError: too many trials are waiting.
        """
        wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
        if wanted is None or self._tokenizer is None:  # vLLM refuses it without a tokenizer
            return
        if self._backend not in TRIED:
            raise RequestRejectedError(
                f"structured outputs by {self._backend} are refused, since nothing bounds what "
                'they cost: set "backend" of --structured-outputs-config to auto, xgrammar, '
                "guidance or outlines"
            )
        structure = structure_of(wanted, self._backend)
        if structure is None:
            return
        schema = _as_schema(wanted.json)
        falls_to_outlines = self._falls_to_outlines(schema)
        if falls_to_outlines and has_xgrammar_unsupported_json_features(schema):
            raise RequestRejectedError(FOR_OUTLINES)
        key = hashlib.sha256(repr(structure).encode("utf-8", "surrogatepass")).digest()
        said = self._outcomes.get(key)
        if said is None:
            said = await self._tried(key, structure)
        if not said:
            raise self._too_much()
        if said == REFUSED and falls_to_outlines:
            raise RequestRejectedError(FOR_OUTLINES)
        if said == REFUSED and structure.kind == "structural_tag":
            raise RequestRejectedError(f"structural_tag: {self._backend} does not take it")
        slowest_s = float(said.removeprefix(COMPILES)) if said != REFUSED else 0.0
        if _masks_s(params.n, slowest_s) > FEW_S:
            most = SHARE_S * max(engines, 1)
            # Bulk calls would wait with the room that others need.
            waits = params.n <= CHOICES_LIKE_CHATS and _choices().calls == 1
            if not await self._masks.take(params.n * slowest_s, most, waits=waits):
                raise OverloadedError(
                    "other requests of this client have structures that take an engine long for "
                    "each token: send fewer at a time, or with fewer choices or prompts"
                )

    def _falls_to_outlines(self, schema: object) -> bool:
        """Return whether vLLM passes a structure that xgrammar refuses to outlines: guidance knows
        neither patternProperties nor the oldest tokenizers of Mistral.
        """
        return self._backend == "auto" and (
            is_old_mistral(self._tokenizer) or has_guidance_unsupported_json_features(schema)
        )

    def _too_much(self) -> RequestRejectedError:
        most = f"{self._bounds.cpu_s} s of a core or {self._bounds.memory_bytes >> 20} MiB"
        return RequestRejectedError(
            "the structure of the answer (a JSON schema, a grammar, a regex or choices) takes "
            f"more than {most} to compile, or too long to read or for each token: use fewer "
            "optional parts, repetitions and bounds on lengths"
        )

    def close(self) -> None:
        self._work.close()
        self._slow_work.close()

    async def _tried(self, key: _Key, structure: Structure) -> bytes:
        """Try a structure, unless a request that this one waited for did: a batch's prompts share
        one trial.
        """
        turn = self._clients.of_client()
        try:
            async with asyncio.timeout(WAIT_S):
                await turn.acquire()
        except TimeoutError as error:
            raise OverloadedError(
                "too many structures of answers of this client are being tried"
            ) from error
        try:
            said = self._outcomes.get(key)
            if said is None:
                said = await self._work.ask(structure) or await self._slow_work.ask(structure)
                self._outcomes.put(key, said)
            return said
        finally:
            turn.release()

    def _trials_of(self, bounds: Bounds) -> BoundedWork:
        vocabulary = partial(self._vocabulary, bounds)
        return BoundedWork(COMMAND, "structures of answers", WAIT_S, bounds, vocabulary)

    def _vocabulary(self, bounds: Bounds) -> Vocabulary:
        """Return the vocabulary as an engine makes it, for each kind of tokenizer."""
        info, outlines = "", None
        if self._backend == "outlines":
            outlines = get_outlines_vocabulary(self._tokenizer).inner
        elif self._backend != "guidance":
            engines = XgrammarBackend(
                self._config, self._tokenizer, self._config.model_config.get_vocab_size()
            )
            grammar = engines.compiler.compile_builtin_json_grammar()
            info = grammar.tokenizer_info.serialize_json()
        compact = self._config.structured_outputs_config.disable_any_whitespace
        return Vocabulary(self._backend, info, outlines, compact, bounds)


def _choices() -> _Choices:
    context = current_context()
    if (found := context.find(_Choices)) is None:
        context.put(found := _Choices())
    return found


def _masks_s(choices: int, slowest_s: float) -> float:
    """Return the CPU seconds of a step for the masks of the request so far. Raises
    RequestRejectedError if they slow down an engine.
    """
    so_far = _choices()
    so_far.count += choices
    so_far.calls += 1
    masks_s = min(so_far.count, CHOICES_AT_ONCE) * slowest_s
    if so_far.count > 1 and masks_s > MAX_STEP_S:
        raise RequestRejectedError(
            "the structure of the answer takes too long for each token of so many choices or "
            "prompts: ask for fewer with `n`, or send several requests"
        )
    return masks_s


def leave_structures_to_trials() -> None:
    """Prevent vLLM from compiling structures while it reads a request, before any trial.

    vLLM does so on the event loop: a structural tag of 7 KB took 3.5 s. It validates each structure
    again after the trial.
    """
    protocol.validate_structural_tag_payload = _validate_depth_of_tag
    vars(abstract_parser)["_xgrammar_supports"] = _has_features_of_xgrammar


def structure_of(wanted: StructuredOutputsParams, backend: str) -> Structure | None:
    """Return the structure for the engine's compiler; None if there is none, or a constant one."""
    if wanted.json is not None:
        return Structure("json", _as_text(wanted.json))
    if wanted.regex is not None:
        return Structure("regex", wanted.regex)
    if wanted.choice is not None and backend == "outlines":
        return Structure("regex", "(" + "|".join(re.escape(each) for each in wanted.choice) + ")")
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


def is_old_mistral(tokenizer: TokenizerLike | None) -> bool:
    """Return whether a tokenizer is one of Mistral's before Tekken."""
    return is_mistral_tokenizer(tokenizer) and not getattr(tokenizer, "is_tekken", True)


def _as_schema(said: object) -> object:
    """Parse a schema. Raises vLLM's error for deep nesting, before any code walks it."""
    check_json_nesting(said)
    try:
        return json.loads(said) if isinstance(said, str) else said
    except ValueError:
        return None  # vLLM reports the error


def _validate_depth_of_tag(payload: object, *, parameter: str) -> None:
    del parameter
    check_json_nesting(payload, structural_tag=True)


def _has_features_of_xgrammar(wanted: StructuredOutputsParams) -> bool:
    """Return whether one tag can have tools and the structure of a chat."""
    return not has_xgrammar_unsupported_json_features(_as_schema(wanted.json))

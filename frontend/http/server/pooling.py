"""Pooling requests (embeddings, scores, classes, rewards): rendered like all others, within limits.

The only file that touches vLLM's serving classes for them. These classes would render, and fetch
media, on the tokenizer's thread, which all prompts need, or on the event loop.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from importlib import import_module
from itertools import chain
from operator import mul
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.pooling.classify.protocol import ClassificationData
from vllm.entrypoints.pooling.classify.serving import ServingClassification
from vllm.entrypoints.pooling.scoring.io_processor import (
    JinaRankingIOProcessor,
    LateInteractionIOProcessor,
    ScoringIOProcessor,
)
from vllm.entrypoints.pooling.scoring.typing import ScoringData
from vllm.entrypoints.pooling.utils import encode_pooling_output_base64

from common.errors import OverloadedError, RequestRejectedError
from frontend.asgi import as_vllm_error
from frontend.client_turns import CLIENT_SHARE
from frontend.http.limits.tenant_limits import TenantQuota
from frontend.http.settings import HttpSettings
from frontend.http.streaming.whole_answers import (
    DeferredParts,
    Pieces,
    entries,
    written,
)
from frontend.processing import LONG, TextCut, Tokenizing, texts_in
from frontend.request import batch_of_request
from frontend.request_context import current_context

Vllms: TypeAlias = Any
"""An object of vLLM's: a request, its context, or a processor."""

Rendered: TypeAlias = dict[str, Vllms]
"""vLLM's ``PoolingEngineInput``, or its raw material."""

Run: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function on the thread of the tokenizer, in a turn of this task's client."""

_INPUTS: Final = (
    ("input",),
    ("messages",),
    ("data_1", "data_2"),
    ("query", "documents"),
    ("texts", "images", "inputs"),
)
"""Fields that hold the inputs of vLLM's requests, grouped by kind of request."""

MANY_NUMBERS: Final = 1 << 16
"""Numbers of a pooled answer from which they are serialized while it is sent."""

MAX_TYPED_NUMBERS: Final = 1 << 22
"""Numbers that ``/v2/embed`` converts to other types: 1,024 vectors of 4,096. vLLM makes an object
of 32 bytes of each."""

MAX_MIXED_NUMBERS: Final = 1 << 18
"""The limit where floats are among the types: those are serialized at once then."""

NUMBERS_AT_ONCE: Final = 1 << 13

BASE64_AT_ONCE: Final = 3 << 16
"""Numbers of one piece: three of any type fill whole groups of base64."""

_STAND_IN_NUMBERS: Final = 32
"""Random numbers that stay apart in any type, those of a byte included."""

_NO_ROOM: Final = "Truncation error"
"""Beginning of the tokenizer's error for a document that can't be truncated enough."""

_ONE_IN_A_LIST: Final = ("input", "messages")
"""Fields in which a list may be one input: tokens, or a conversation."""

MAX_INPUTS: Final = 16_384
"""Inputs of all requests, which wait in memory: eight of the largest requests by default."""

RENDERED_AT_ONCE: Final = 16
"""Inputs of one request that are rendered at once. 2,000 pictures, in 258 KB, stopped the event
loop for 0.95 seconds, and prompts of others waited behind all that a request has."""

LARGEST_REQUESTS: Final = 8
"""Requests of the most tokens that are worked on at once."""

MAX_SIMILARITIES: Final = 1 << 27
"""Tokens of queries times tokens of their documents, where this process multiplies their vectors
(late interaction): a second of some cores. A matrix of them is 512 MiB."""


class PoolingLimits:
    """Limits that all pooling requests of a frontend share."""

    def __init__(self, settings: HttpSettings, *, several_keys: bool) -> None:
        """With ``several_keys`` no key may take more than ``--key-share``."""
        self._most = settings.max_pooling_inputs
        share = settings.key_share if several_keys else CLIENT_SHARE
        self._most_tokens = settings.max_pooling_tokens
        inputs = max(self._most, MAX_INPUTS)
        self._inputs = TenantQuota(
            "inputs to be pooled", inputs, max(self._most, int(inputs * share))
        )
        tokens = LARGEST_REQUESTS * self._most_tokens
        self._tokens = TenantQuota(
            "tokens to be pooled", tokens, max(self._most_tokens, int(tokens * share))
        )
        memory = settings.pooling_memory_bytes
        self._most_memory = int(memory * share)
        self._memory = TenantQuota("bytes of pooled answers", memory, self._most_memory)

    @contextmanager
    def admitted(self, inputs: int) -> Iterator[ExitStack]:
        """Admit a request of this task until it is computed; give what holds the memory of its
        answer. Raises RequestRejectedError or OverloadedError.
        """
        if inputs > self._most:
            raise RequestRejectedError(
                f"the request has {inputs} inputs, more than the {self._most} of "
                "--max-pooling-inputs: send several requests"
            )
        request = current_context()
        tenant = request.client
        tokens = PooledTokens(self._most_tokens, self._tokens, tenant)
        request.put(tokens)
        kept = 0

        def keep(nbytes: int) -> None:
            nonlocal kept
            if kept + nbytes > self._most_memory:
                raise RequestRejectedError(
                    f"the request's outputs have more than the {self._most_memory} bytes that one "
                    "client may have of --pooling-memory-mb: send several requests, or shorter "
                    "inputs"
                )
            self._memory.take(tenant, nbytes)
            kept += nbytes

        self._inputs.take(tenant, inputs)
        batch_of_request().keep = keep
        try:
            with ExitStack() as held:
                held.callback(lambda: self._memory.give_back(tenant, kept))
                yield held
        finally:
            self._inputs.give_back(tenant, inputs)
            self._tokens.give_back(tenant, tokens.taken)

    def check_tokens(self, tokens: int) -> None:
        """Raise RequestRejectedError for more than one request may have workers compute."""
        check_tokens(tokens, self._most_tokens)


def check_tokens(tokens: int, most: int) -> None:
    """Raise RequestRejectedError for more tokens than one request may have."""
    if tokens > most:
        raise RequestRejectedError(
            f"the inputs of the request have more than {most} tokens together, where a query "
            "counts with each of its documents or items: send several requests, or shorter texts"
        )


class PooledTokens:
    """Count the tokens that one request has workers compute.

    A query is computed with each of its documents: 18 KB took an engine 40 s.
    """

    def __init__(self, most: int, quota: TenantQuota, tenant: str) -> None:
        self.most = most
        self.taken = 0
        self._quota = quota
        self._tenant = tenant

    def add(self, tokens: int) -> None:
        """Take tokens. Raises RequestRejectedError or OverloadedError, and takes none then."""
        check_tokens(self.taken + tokens, self.most)
        self._quota.take(self._tenant, tokens)
        self.taken += tokens


class _LimitedServing(PoolingBaseServing):
    """Our part of vLLM's serving classes for pooling."""

    _limits: PoolingLimits

    async def __call__(self, request: Vllms, raw_request: Request | None = None) -> Response:
        """Answer a request. Raises VLLMError if it is rejected."""
        parts = current_context().find(DeferredParts)
        try:
            with self._limits.admitted(inputs_of(request)) as held:
                self.engine_client.check_admission()
                answer = await super().__call__(request, raw_request)
                if parts is not None:  # its numbers stay in memory until they are sent
                    parts.held.enter_context(held.pop_all())
                return answer
        except (OverloadedError, RequestRejectedError) as error:
            raise as_vllm_error(error) from error

    def _build_response(self, ctx: Vllms) -> Response:
        parts = current_context().find(DeferredParts)
        numbers = sum(each.outputs.data.numel() for each in ctx.final_res_batch)
        if parts is not None and numbers > MANY_NUMBERS:
            if isinstance(self, ServingClassification):
                labels = getattr(self.model_config.hf_config, "id2label", {})
                ctx.final_res_batch = [
                    _classified(index, each, labels, parts)
                    for index, each in enumerate(ctx.final_res_batch)
                ]
            elif _has_floats(ctx):
                ctx.final_res_batch = [_deferred(each, parts) for each in ctx.final_res_batch]
            elif getattr(ctx.request, "encoding_format", None) == "base64":
                encode = partial(
                    encode_pooling_output_base64,
                    embed_dtype=ctx.request.embed_dtype,
                    endianness=ctx.request.endianness,
                )
                ctx.final_res_batch = [
                    _deferred_base64(each, parts, encode) for each in ctx.final_res_batch
                ]
            elif types := getattr(ctx.request, "embedding_types", None):
                _check_typed(types, numbers)
        answer = super()._build_response(ctx)
        if parts is not None and isinstance(answer, StreamingResponse):
            return _without_cycle(answer, parts)
        return answer


class _Rendering(PoolingBaseServing):
    """Our part that vLLM's serving classes add to: that of embeddings cuts long inputs."""

    _tokenizing: Tokenizing

    async def _preprocessing(self, io_processor: Vllms, ctx: Vllms) -> None:
        """Render without blocking a thread that other requests need."""
        run = self._tokenizing.among_others
        tokens = current_context().find(PooledTokens)
        assert tokens is not None, "the request was admitted"
        if isinstance(io_processor, ScoringIOProcessor):
            io_processor = await _with_cut_texts(io_processor, ctx.request, run, tokens.most)
        asked = await run(partial(io_processor.get_request_factory_online, ctx))
        if not asked:
            raise ValueError("You must pass at least one prompt")
        turn = asyncio.Lock()  # of its pairs, between which its client's other requests have theirs
        slots = asyncio.Semaphore(RENDERED_AT_ONCE)

        async def render(each: Rendered, times: int) -> Rendered:
            async with slots:
                made = await _render(io_processor, run, each, turn)
            tokens.add(self._extract_prompt_len(made["prompts"]) * times)
            return made

        times = [1] * len(asked)
        if ctx.n_queries == 1:
            times[0] = max(1, len(asked) - 1)
        ctx.engine_inputs = await _together(map(render, asked, times))
        if _multiplies_here(io_processor):
            lengths = [self._extract_prompt_len(each["prompts"]) for each in ctx.engine_inputs]
            _check_similarities(lengths, ctx.n_queries)


def _without_cycle(answer: Vllms, parts: DeferredParts) -> Response:
    """Return an answer in bytes that leaves memory once it is sent, or its client has left: an
    error that ends Starlette's way through an iterable is in a cycle with it."""
    parts.add(stand_in := random.random(), iter(answer.body_iterator.ag_frame.f_locals["iterator"]))
    return Response(written(stand_in), answer.status_code, answer.headers)


def _check_typed(types: Sequence[str], numbers: int) -> None:
    most = MAX_MIXED_NUMBERS if "float" in types else MAX_TYPED_NUMBERS
    if numbers > most:
        raise ValueError(
            f"the answer has {numbers} numbers, more than the {most} of which one request gets "
            f"the `embedding_types` {', '.join(types)}: ask for one type, or send several requests"
        )


def _has_floats(ctx: Vllms) -> bool:
    """Return whether an answer has its outputs as plain JSON numbers."""
    kinds = [getattr(ctx.request, "encoding_format", None)]
    if hasattr(ctx.request, "embedding_types"):
        kinds = ctx.request.embedding_types or ["float"]
    return ctx.response is None and set(kinds) == {"float"}


def _deferred(output: Vllms, parts: DeferredParts) -> Vllms:
    """Return an output with one stand-in for all numbers, which follow as the answer is sent."""
    stand_in = random.random()
    parts.add([stand_in], _rows(output.outputs.data))
    return _short(output, stand_in)


def _deferred_base64(output: Vllms, parts: DeferredParts, encode: Callable[[Vllms], str]) -> Vllms:
    """Defer a text of all numbers, as :func:`_deferred`: 64 million of them took 1.3 GB, and the
    GIL for seconds."""
    stand_in = _with_data(output, torch.rand(_STAND_IN_NUMBERS))
    parts.add(encode(stand_in), _in_base64(output, encode))
    return stand_in


def _in_base64(output: Vllms, encode: Callable[[Vllms], str]) -> Pieces:
    yield b'"'
    for some in output.outputs.data.flatten().split(BASE64_AT_ONCE):
        yield encode(_with_data(output, some)).encode()
    yield b'"'


def _classified(
    index: int, output: Vllms, labels: Mapping[int, str], parts: DeferredParts
) -> Vllms:
    """Defer a whole item, as :func:`_deferred`: its label depends on the numbers."""
    data, stand_in = output.outputs.data, random.random()
    if data.ndim != 1:
        return output  # vLLM says so
    likely = int(np.argmax(data.float().numpy()))
    one = ClassificationData(index=index, label=labels.get(0), probs=[stand_in], num_classes=1)
    found = {"label": labels.get(likely), "num_classes": len(data)}
    before, _, after = written(one.model_dump() | found).partition(written([stand_in]))
    parts.add(one.model_dump(), chain([before], _rows(data), [after]))
    return _short(output, stand_in)


def _short(output: Vllms, stand_in: float) -> Vllms:
    if not output.outputs.data.isfinite().all():
        raise ValueError("the model gives numbers that are not finite, which JSON does not have")
    return _with_data(output, torch.tensor([stand_in], dtype=torch.float64))


def _with_data(output: Vllms, data: torch.Tensor) -> Vllms:
    other = copy(output)
    other.outputs = copy(output.outputs)
    other.outputs.data = data
    return other


def _rows(data: torch.Tensor) -> Pieces:
    """Yield the numbers of a vector or a matrix as JSON lists."""
    rows = torch.atleast_2d(data)
    step = max(1, NUMBERS_AT_ONCE // max(1, rows.shape[1]))
    outer = (b"[", b"]") if data.dim() > 1 else (b"", b"")
    yield outer[0]
    yield from entries(len(rows), lambda part: rows[part].tolist(), step)
    yield outer[1]


def limit_pooling(app: FastAPI, limits: PoolingLimits, tokenizing: Tokenizing) -> None:
    """Replace vLLM's pooling objects with subclasses that render as we do, within limits."""
    for name in list(app.state):
        if isinstance(serving := app.state[name], PoolingBaseServing):
            setattr(app.state, name, _limited(serving, limits, tokenizing))


def _limited(
    serving: PoolingBaseServing, limits: PoolingLimits, tokenizing: Tokenizing
) -> PoolingBaseServing:
    kind = type(serving)
    bases = _LimitedServing, kind, _Rendering
    made: PoolingBaseServing = object.__new__(type(kind.__name__, bases, {}))
    # Not on the thread of the tokenizer, which all prompts need.
    finish = partial(asyncio.to_thread, made._postprocessing)
    ours = {"_limits": limits, "_tokenizing": tokenizing, "_postprocessing_async": finish}
    vars(made).update(vars(serving), **ours)
    return made


def inputs_of(asked: Vllms) -> int:
    """Return a lower bound on the inputs of a request, in constant time."""
    return max(sum(_count(asked, name) for name in names) for names in _INPUTS)


def _count(asked: Vllms, name: str) -> int:
    value = getattr(asked, name, None)
    if not isinstance(value, (list, tuple)):
        return 0 if value is None else 1
    if name in _ONE_IN_A_LIST and value and not isinstance(value[0], (str, list, tuple)):
        return 1
    return len(value)


async def _together(works: Iterable[Awaitable[Rendered]]) -> list[Rendered]:
    """Await all, in order. If one fails, cancel the rest."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _with_cut_texts(processor: Vllms, asked: Vllms, run: Run, most: int) -> Vllms:
    """Return a processor of scores that has the texts of one request, cut to what it can use."""
    params = asked.build_tok_params(processor.model_config)
    cut = TextCut(processor.renderer.get_tokenizer(), params, most)
    found = processor.valid_inputs_online(asked)
    limits = (getattr(asked, f"max_tokens_per_{name}", 0) for name in ("query", "doc"))
    kept: list[list[Vllms]] = []
    for texts, limit in zip((found.data_1, found.data_2), limits, strict=True):
        kept.append([])
        for some in _slices(texts):  # others need the thread too
            kept[-1] += await run(partial(_cut_each, cut, some, limit))
            check_tokens(cut.tokens, most)
    of_request = copy(processor)
    of_request.valid_inputs_online = lambda _: ScoringData(*kept)
    return of_request


def _cut_each(cut: TextCut, texts: Sequence[Vllms], limit: int) -> list[Vllms]:
    return [cut(text, limit) for text in texts]


def _slices(texts: Sequence[Vllms]) -> Iterator[Sequence[Vllms]]:
    """Yield texts, or lists of content parts, in runs that take a thread for some 50 ms."""
    start = size = 0
    for index, text in enumerate(texts, 1):
        size += sum(map(len, texts_in(text)))
        if size >= LONG or index == len(texts):
            yield texts[start:index]
            start, size = index, 0


def _multiplies_here(processor: Vllms) -> bool:
    """Return whether scores come from a vector of each token, of a query and of a document."""
    late = isinstance(processor, LateInteractionIOProcessor)
    return late and not isinstance(processor, JinaRankingIOProcessor)


def _check_similarities(lengths: Sequence[int], count: int) -> None:
    queries, documents = lengths[:count], lengths[count:]
    if count == 1:
        queries = [*queries] * len(documents)
    if sum(map(mul, queries, documents)) > MAX_SIMILARITIES:
        raise RequestRejectedError(
            "the tokens of queries times those of their documents are more than "
            f"{MAX_SIMILARITIES}: send fewer or shorter ones"
        )


async def _render(processor: Vllms, run: Run, asked: Rendered, turn: asyncio.Lock) -> Rendered:
    """Do the processor's ``render`` in the way that other requests are rendered."""
    renderer = processor.renderer
    options = {
        "tok_params": asked["tok_params"],
        "prompt_extras": asked["prompt_extras"],
        "skip_mm_cache": asked["skip_mm_cache"],
    }
    if (slot := asked.get("late_chunking")) is not None:
        chunking: Vllms = import_module("vllm.entrypoints.pooling.token_embed.late_chunking")
        text, options["tok_params"] = chunking.prepare_late_chunking_input(
            processor.vllm_config, asked
        )
    if "conversations" in asked:
        _, (prompt,) = await renderer.render_chat_async(
            [asked["conversations"]], asked["chat_params"], **options
        )
    elif "prompts" in asked:
        (prompt,) = await renderer.render_cmpl_async([asked["prompts"]], **options)
    else:  # a query and a document
        async with turn:
            rendered: Rendered = await run(partial(_HalfRendering(processor).render, asked))
        prompt = await renderer.process_for_engine_async(*rendered["prompts"])
        return {**rendered, "prompts": prompt}
    if slot is not None:  # the answer says which characters each chunk has
        slot.metadata = chunking.build_late_chunking_metadata(
            text,
            len(prompt["prompt_token_ids"]),
            prompt.pop("prompt_token_offsets", None),
            asked["params"].late_chunking_params.chunk_size,
        )
    return {
        "prompts": prompt,
        "params": asked["params"],
        "lora_requests": asked["lora_requests"],
        "priorities": asked["priorities"],
    }


class _HalfRendering:
    """Stand-in for a processor and its renderer that leaves media unprocessed."""

    def __init__(self, processor: Vllms) -> None:
        self._processor = processor
        self.renderer = self

    def render(self, asked: Rendered) -> Rendered:
        """Run the processor's own ``render`` without its last step."""
        try:
            rendered: Rendered = type(self._processor).render(self, asked)
        except Exception as error:  # tokenizers raise no type of their own
            if str(error).startswith(_NO_ROOM):
                raise ValueError("the query leaves no room for a document: shorten it") from error
            raise
        return rendered

    def process_for_engine(self, prompt: Vllms, arrival_time: float) -> tuple[Vllms, float]:
        """Skip the last step, which the caller does."""
        return prompt, arrival_time

    def __getattr__(self, name: str) -> Vllms:
        return getattr(self._processor, name)

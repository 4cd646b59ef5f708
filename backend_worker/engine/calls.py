"""Calls of AsyncLLM: generate from, or pool, a prompt with processed media."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TypeAlias

import torch
from vllm.inputs import EncoderDecoderInput, EngineInput, mm_input, tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from backend_worker.engine.config import served_ranks
from common.errors import EngineFailedError, RequestRejectedError, WorkerBusyError
from common.observability import tracing
from common.request_plane.protocol import MAX_POOLED_BYTES, MediaPart, Submit, drop_transfer_params


def media_input(
    token_ids: list[int],
    parts: Sequence[MediaPart],
    items: Sequence[MultiModalKwargsItem | None],
    cache_salt: str | None,
) -> EngineInput:
    """Group a prompt's media by modality, as AsyncLLM takes them. Parts come by position; audio and
    frames of one video may share a position. Raises RequestRejectedError: no frontend can have
    produced this order."""
    modalities = _modalities(parts)
    kwargs: dict[str, list[MultiModalKwargsItem | None]] = {name: [] for name in modalities}
    hashes: dict[str, list[str]] = {name: [] for name in modalities}
    placeholders: dict[str, list[PlaceholderRange]] = {name: [] for name in modalities}
    for part, item in zip(parts, items, strict=True):
        kwargs[part.modality].append(item)
        hashes[part.modality].append(part.mm_hash)
        placeholders[part.modality].append(_placeholder(part))
    return mm_input(token_ids, kwargs, hashes, placeholders, cache_salt=cache_salt)


def encoded(prompt: EngineInput) -> EngineInput:
    """Return a decoder's prompt for an encoder. Its own tokens serve checks already made."""
    nothing = tokens_input([])
    return EncoderDecoderInput(type="enc_dec", encoder_prompt=nothing, decoder_prompt=prompt)


def _modalities(parts: Sequence[MediaPart]) -> list[str]:
    """Order modalities so that vLLM, which sorts media by offset alone, keeps the frontend's order.
    The order is part of block hashes."""
    sorter = TopologicalSorter({part.modality: () for part in parts})
    for one, other in pairwise(parts):
        if one.offset == other.offset and one.modality != other.modality:
            sorter.add(other.modality, one.modality)
    try:
        return list(sorter.static_order())
    except CycleError as error:
        raise RequestRejectedError("the media are in no order that vLLM could keep") from error


def _placeholder(part: MediaPart) -> PlaceholderRange:
    mask = None
    if part.is_embed is not None:
        mask = torch.frombuffer(bytearray(part.is_embed), dtype=torch.bool)
    return PlaceholderRange(offset=part.offset, length=part.length, is_embed=mask)


AnyOutput: TypeAlias = RequestOutput | PoolingRequestOutput
"""An engine's output of a generating or of a pooling request."""


def ask(
    llm: AsyncLLM,
    submit: Submit,
    prompt: EngineInput,
    adapter: LoRARequest | None,
    rank: int | None,
) -> AsyncGenerator[AnyOutput, None]:
    """Return the outputs of a request. Nothing suspends before the prompt is sent. ``adapter`` is
    the engine's own object; ``rank`` counts among the ranks behind ``llm``. Raises
    RequestRejectedError: the request would kill the engine. Also raises AsyncLLM's errors."""
    _check_logprobs(llm, submit)
    drop_transfer_params(submit.sampling_params)
    headers = tracing.headers_onwards(submit.trace_headers)
    if submit.pooling_params is not None:
        return _pooled(llm, submit, prompt, adapter, rank, headers)
    generated: AsyncGenerator[RequestOutput, None] = llm.generate(
        prompt,
        submit.sampling_params,
        submit.request_id,
        prompt_text=submit.prompt_text,
        lora_request=adapter,
        trace_headers=headers,
        priority=submit.priority,
        data_parallel_rank=rank,
        reasoning_ended=submit.reasoning_ended,
        reasoning_parser_kwargs=submit.reasoning_parser_kwargs,
    )
    return generated


def _check_logprobs(llm: AsyncLLM, submit: Submit) -> None:
    """Refuse prompt_logprobs with LoRA: vLLM applies the adapters of a step's sampled tokens to the
    prompt's logits. On CPUs that breaks; on GPUs kernels write beyond the logits of a short one.
    Refuse named tokens with speculation: in a step with drafts vLLM leaves them out."""
    params, config = submit.sampling_params, llm.vllm_config
    if params is None:
        return
    if params.prompt_logprobs is not None and config.lora_config is not None:
        raise RequestRejectedError("prompt_logprobs: not with --enable-lora at the worker")
    if params.logprob_token_ids and config.speculative_config is not None:
        raise RequestRejectedError(
            "logprob_token_ids and label_token_ids: not with --speculative-config at the worker"
        )


def has_failed(output: AnyOutput) -> bool:
    """Return whether the engine failed on the request, perhaps because it had evicted its media."""
    if isinstance(output, PoolingRequestOutput):
        return output.error is not None
    return any(one.finish_reason == "error" for one in output.outputs)


async def _pooled(
    llm: AsyncLLM,
    submit: Submit,
    prompt: EngineInput,
    adapter: LoRARequest | None,
    rank: int | None,
    headers: Mapping[str, str] | None,
) -> AsyncGenerator[PoolingRequestOutput, None]:
    options = {
        "lora_request": adapter,
        "trace_headers": headers,
        "priority": submit.priority,
    }
    if len(served_ranks(llm.vllm_config.parallel_config)) > 1:
        # encode() takes no rank, process_inputs does.
        prompt = llm.input_processor.process_inputs(
            submit.request_id,
            prompt,
            submit.pooling_params,
            supported_tasks=await llm.get_supported_tasks(),
            data_parallel_rank=rank,
            **options,
        )
    pooled = llm.encode(prompt, submit.pooling_params, submit.request_id, **options)
    async with aclosing(pooled) as outputs:
        async for output in outputs:
            yield output


def check_form(output: AnyOutput, submit: Submit) -> None:
    """Refuse a request if an output shows that the engine can't write the demanded grammar.

    vLLM validates grammars earlier, but its engine may still fail to compile one, or find no
    allowed token. It reports only a failure, for which vLLM's server answers 500.

    Raises RequestRejectedError: the request has a grammar and failed.
    """
    params = submit.sampling_params
    if params is not None and params.structured_outputs is not None and has_failed(output):
        raise RequestRejectedError(
            "the engine can't write what the request demands of its answer (structured outputs): "
            "it could not be compiled, lets no token follow, or takes too long for each token"
        )


def check(output: AnyOutput) -> None:
    """Check a pooled output.

    Raises:
        EngineFailedError: the engine failed on it.
        WorkerBusyError: an operator had the engine end it.
        RequestRejectedError: the output is larger than an answer may be.
    """
    if not isinstance(output, PoolingRequestOutput):
        return
    if output.error is not None:
        raise EngineFailedError(f"the engine failed: {output.error.message}")
    data = output.outputs.data
    if not data.numel():  # vLLM's answer to an ended request
        raise WorkerBusyError("the engine was told to end the request")
    if data.nbytes > MAX_POOLED_BYTES:
        raise RequestRejectedError(
            f"the answer would have {data.nbytes >> 20} MiB, more than {MAX_POOLED_BYTES >> 20}: "
            "shorten the input"
        )

"""What a request asks of AsyncLLM: a prompt with processed media, to generate from or to pool."""

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
from common.request_plane.protocol import MOST_POOLED_BYTES, MediaPart, Submit
from common.request_plane.transfer_params import drop_transfer_params


def media_input(
    token_ids: list[int],
    parts: Sequence[MediaPart],
    items: Sequence[MultiModalKwargsItem | None],
    cache_salt: str | None,
) -> EngineInput:
    """A prompt with media as AsyncLLM takes it, which keeps them by modality. Parts come by
    position; sound and pictures of one video may share theirs.

    Raises RequestRejectedError: no frontend can have found the parts in this order.
    """
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
    """The prompt of a decoder as AsyncLLM takes it where an encoder has its media.

    The encoder's own tokens are for checks, which frontends have made.
    """
    nothing = tokens_input([])
    return EncoderDecoderInput(type="enc_dec", encoder_prompt=nothing, decoder_prompt=prompt)


def _modalities(parts: Sequence[MediaPart]) -> list[str]:
    """The modalities in an order under which vLLM, which sorts media by offset alone,
    finds them as the frontend did; their order is part of block hashes."""
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
"""What an engine says of a request that generates, or of one that pools."""


def ask(
    llm: AsyncLLM,
    submit: Submit,
    prompt: EngineInput,
    adapter: LoRARequest | None,
    rank: int | None,
) -> AsyncGenerator[AnyOutput, None]:
    """The outputs of a request, with an adapter as this engine knows it, on a rank among those
    behind ``llm``. Nothing suspends before its prompt is sent.

    Raises RequestRejectedError: the engine would end with it; and what AsyncLLM raises.
    """
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
        session_id=submit.session_id,
        reasoning_ended=submit.reasoning_ended,
        reasoning_parser_kwargs=submit.reasoning_parser_kwargs,
    )
    return generated


def _check_logprobs(llm: AsyncLLM, submit: Submit) -> None:
    """vLLM's kernels for CPUs compute the logits of prompts with the adapters of those tokens that
    are sampled in the same step, of which there is one for each request, and break if there are
    two (`punica_cpu.add_lora_logits`)."""
    params = submit.sampling_params
    if params is None or params.prompt_logprobs is None:
        return
    config = llm.vllm_config
    if config.lora_config is not None and config.device_config.device_type == "cpu":
        raise RequestRejectedError("prompt_logprobs: not on a CPU with --enable-lora")


def has_failed(output: AnyOutput) -> bool:
    """Whether the engine failed on the request, perhaps since it had evicted its media."""
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
        # vLLM's encode() can be told the rank in no other way.
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


def check_form(first: AnyOutput, submit: Submit) -> None:
    """Refuse a request if the engine can't write the form of answer that it demands, by its first
    output.

    vLLM looks at grammars before, but its engine may find that one can't be compiled, or lets no
    token follow. It says nothing but that the request failed, and its server answers 500.

    Raises RequestRejectedError: it can't.
    """
    params = submit.sampling_params
    if params is not None and params.structured_outputs is not None and has_failed(first):
        raise RequestRejectedError(
            "the engine can't write what the request demands of its answer (structured outputs): "
            "it could not be compiled, or lets no token follow"
        )


def check(output: AnyOutput) -> None:
    """Refuse what was pooled and is no answer, or too large for one.

    Raises:
        EngineFailedError: the engine failed on it.
        WorkerBusyError: an operator had the engine end it.
        RequestRejectedError: it is too large.
    """
    if not isinstance(output, PoolingRequestOutput):
        return
    if output.error is not None:
        raise EngineFailedError(f"the engine failed: {output.error.message}")
    data = output.outputs.data
    if not data.numel():  # vLLM's answer to what is ended
        raise WorkerBusyError("the engine was told to end the request")
    if data.nbytes > MOST_POOLED_BYTES:
        raise RequestRejectedError(
            f"the answer would have {data.nbytes >> 20} MiB, more than {MOST_POOLED_BYTES >> 20}: "
            "shorten the input"
        )

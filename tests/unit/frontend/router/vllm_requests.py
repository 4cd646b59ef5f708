"""vLLM requests for comparison, and random media for them."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, get_request_block_hasher
from vllm.v1.request import Request

from common.identity import MmIdentifier
from frontend.router.hashing.block_hasher import BlockMmInfos, MediaSpan


def vllm_request(
    token_ids: Sequence[int],
    spans: Sequence[MediaSpan] = (),
    *,
    lora: tuple[str, str] | None = None,
    cache_salt: str | None = None,
    block_size: int | None = None,
) -> Request:
    """A request as vLLM's scheduler holds it, hashed by vLLM if a block size is given."""
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=span.identifier,
            mm_position=PlaceholderRange(span.offset, span.length, _mask(span)),
        )
        for span in spans
    ]
    return Request(
        request_id="r",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        lora_request=None if lora is None else LoRARequest(lora[0], 1, lora[1]),
        cache_salt=cache_salt,
        block_hasher=None
        if block_size is None
        else get_request_block_hasher(block_size, sha256_cbor),
    )


def _mask(span: MediaSpan) -> torch.Tensor | None:
    """Every third token is text, in every other medium: blocks are hashed as if it weren't."""
    return torch.arange(span.length) % 3 > 0 if span.offset % 2 else None


def vllm_extra_keys(request: Request, block_size: int) -> list[BlockMmInfos]:
    """vLLM's extra keys of every full block, without their tags."""
    infos: list[BlockMmInfos] = []
    current = 0
    for start in range(0, request.num_tokens - block_size + 1, block_size):
        keys, current = generate_block_hash_extra_keys(request, start, start + block_size, current)
        infos.append(tuple((key[1], key[2]) for key in keys or ()))
    return infos


@st.composite
def media_spans(draw: st.DrawFn, max_position: int, *, overlapping: bool) -> list[MediaSpan]:
    """Media items somewhere in a prompt, by offset unless they may overlap."""
    identifiers = st.sampled_from([MmIdentifier(name) for name in ("a", "b", "é" * 9, "h" * 64)])
    count = draw(st.integers(0, 6))
    spans: list[MediaSpan] = []
    position = 0
    for _ in range(count):
        if overlapping:
            offset, length = draw(st.integers(0, max_position)), draw(st.integers(0, 60))
        else:
            offset = position + draw(st.integers(0, 40))
            length = draw(st.integers(1, 60))
            position = offset + length
        spans.append(MediaSpan(draw(identifiers), offset, length))
    return spans

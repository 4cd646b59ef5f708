"""A prompt with processed media, as AsyncLLM takes it."""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import torch
from vllm.inputs import EncoderDecoderInput, EngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange

from common.errors import RequestRejectedError
from common.request_plane.protocol import MediaPart


def media_input(
    token_ids: list[int],
    parts: Sequence[MediaPart],
    items: Sequence[MultiModalKwargsItem | None],
    cache_salt: str | None,
) -> EngineInput:
    """A prompt with media as AsyncLLM takes it, which keeps them by modality.

    Args:
        parts: by position; sound and pictures of one video may share theirs.
        items: what goes to the engine for each.

    Raises:
        RequestRejectedError: no frontend can have found the parts in this order.
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

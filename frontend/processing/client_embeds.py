"""Embeddings that a client sends instead of a medium (``--enable-mm-embeds``).

vLLM finds out that they don't fit their placeholders when they meet in the engine, and
the engine ends. A request must not do that to one worker after another.
"""

from collections.abc import Container
from typing import Final

import torch
from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

from common.errors import RequestRejectedError
from common.vllm_features import omni_splits_embeds

_OMNI: Final = frozenset({"Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"})


def are_embeds(modality: str, item: MultiModalKwargsItem) -> bool:
    """Whether a client sent embeddings in place of a medium."""
    return f"{modality}_embeds" in item


def deadly_embeds(config: ModelConfig) -> frozenset[str]:
    """Modalities whose embeddings end an engine of this model, whatever they are like."""
    if config.architecture not in _OMNI:
        return frozenset()
    return frozenset(each for each in ("image", "video") if not omni_splits_embeds(each))


def check_embeds(
    feature: MultiModalFeatureSpec, width: int, deadly: Container[str] = frozenset()
) -> None:
    """Compare embeddings with their placeholders.

    Args:
        feature: a medium with its tensors; anything but embeddings passes.
        width: of each, see :func:`common.encoder_width.embeds_width`.
        deadly: see :func:`deadly_embeds`.

    Raises:
        RequestRejectedError: they are too few, too many, of another width, or deadly.
    """
    if feature.data is None or not are_embeds(feature.modality, feature.data):
        return
    name = f"{feature.modality}_embeds"
    if feature.modality in deadly:
        raise RequestRejectedError(f"{name}: an engine of this model ends with them")
    embeds = feature.data[name].data
    expected = feature.mm_position.get_num_embeds()
    if not isinstance(embeds, torch.Tensor) or embeds.ndim < 2:
        raise RequestRejectedError(f"{name} must be a tensor of (embeddings, {width})")
    if embeds.shape[-1] != width:
        raise RequestRejectedError(f"{name} are {embeds.shape[-1]} wide, the model's are {width}")
    if embeds.shape[-2] != expected:
        raise RequestRejectedError(
            f"{name} holds {embeds.shape[-2]} embeddings for {expected} placeholder tokens"
        )

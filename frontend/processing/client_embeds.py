"""Embeddings that a client sends instead of a medium (``--enable-mm-embeds``).

vLLM finds out that they don't fit their placeholders when they meet in the engine, and
the engine ends.
"""

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

from common.errors import RequestRejectedError


def are_embeds(modality: str, item: MultiModalKwargsItem) -> bool:
    """Whether a client sent embeddings in place of a medium."""
    return f"{modality}_embeds" in item


def check_embeds(feature: MultiModalFeatureSpec, width: int) -> None:
    """Compare embeddings with their placeholders.

    Args:
        feature: a medium with its tensors; anything but embeddings passes.
        width: of each, see :func:`common.vllm_compat.encoder_width.embeds_width`.

    Raises:
        RequestRejectedError: they are too few, too many, or of another width.
    """
    if feature.data is None or not are_embeds(feature.modality, feature.data):
        return
    name = f"{feature.modality}_embeds"
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

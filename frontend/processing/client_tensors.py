"""Tensors that a client sends instead of a medium: embeddings, and items processed elsewhere.

vLLM notices embeddings (``--enable-mm-embeds``) that don't fit their placeholders only in the
engine, which ends. Its token-in, token-out route takes processed tensors with hashes: only hashes
computed by this frontend are trusted.
"""

from weakref import WeakValueDictionary

import torch
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

from common.errors import RequestRejectedError
from common.identity import MmHash


def are_embeds(modality: str, item: MultiModalKwargsItem) -> bool:
    """Return whether a client sent embeddings in place of a medium."""
    return f"{modality}_embeds" in item


def check_embeds(feature: MultiModalFeatureSpec, width: int) -> None:
    """Raise RequestRejectedError for embeddings that are too few, too many, or not ``width`` wide
    (:func:`common.vllm_compat.engine_settings.embeds_width`). Other media pass.
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
    if not embeds.isfinite().all():  # of NumPy's files, which are not read here
        raise RequestRejectedError(f"{name} has values that are no numbers, or infinite")
    if embeds.shape[-2] != expected:
        raise RequestRejectedError(
            f"{name} holds {embeds.shape[-2]} embeddings for {expected} placeholder tokens"
        )


class HashedItems:
    """Items whose hashes this frontend computed, as long as they live."""

    def __init__(self) -> None:
        # By identity: they are mappings, so not hashable.
        self._items: WeakValueDictionary[int, MultiModalKwargsItem] = WeakValueDictionary()

    def add(self, item: MultiModalKwargsItem) -> None:
        self._items[id(item)] = item

    def __contains__(self, item: MultiModalKwargsItem) -> bool:
        return self._items.get(id(item)) is item


def content_hash(modality: str, item: MultiModalKwargsItem, algorithm: str) -> MmHash:
    """Hash processed tensors: about 1 ms for 2 MB."""
    return MmHash(
        MultiModalHasher.hash_kwargs(algorithm, modality=modality, processed=item.get_data())
    )

"""Encode sounds one after the other where a model can't encode those of different lengths at once.

vLLM gives a model the media of a step as one tensor, or as a list if their shapes differ, which
Kimi-Audio does not take: two clients' sounds of different lengths in one step ended one engine
after the other. An engine's process imports this module with ``slow_structures``.
"""

from typing import Final

from vllm.multimodal import utils
from vllm.multimodal.inputs import MultiModalKwargsItem

_STACKED: Final = "whisper_input_features"
"""Tensors of media that only Kimi-Audio has."""

_can_batch = utils._can_batch_mm_items


def can_batch(left: MultiModalKwargsItem, right: MultiModalKwargsItem) -> bool:
    """See vLLM's."""
    if not _can_batch(left, right):
        return False
    return _STACKED not in left or left[_STACKED].data.shape == right[_STACKED].data.shape


vars(utils)["_can_batch_mm_items"] = can_batch

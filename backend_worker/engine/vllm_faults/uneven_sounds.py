"""Let Kimi-Audio and MiniCPM-o read several sounds in one step.

vLLM gives a model the media of a step as one tensor, or as a list if their shapes differ, which
Kimi-Audio does not take, nor MiniCPM-o for the lengths of a sound's pieces of 30 seconds: two
clients' sounds of different lengths in one step ended one engine after the other. Of sounds that
were encoded, Kimi-Audio puts only the first into its prompt: the other clients were answered as if
they had sent none.
"""

from typing import Any, Final

from vllm.model_executor.models.registry import _LazyRegisteredModel
from vllm.multimodal import utils
from vllm.multimodal.inputs import MultiModalKwargsItem

_STACKED: Final = ("whisper_input_features", "audio_feature_lens")
"""Tensors of media that only Kimi-Audio has, and only MiniCPM-o."""

_MODEL: Final = "KimiAudioForConditionalGeneration"

_load = _LazyRegisteredModel.load_model_cls
_can_batch = utils._can_batch_mm_items


def can_batch(left: MultiModalKwargsItem, right: MultiModalKwargsItem) -> bool:
    """See vLLM's."""
    if not _can_batch(left, right):
        return False
    stacked = [(left[name].data, right[name].data) for name in _STACKED if name in left]
    return all(each.shape == other.shape for each, other in stacked)


def embed_all(kind: Any) -> None:
    """Have a class put the embeddings of all sounds into prompts, which it takes in one list."""
    embed = kind.embed_input_ids

    def embed_input_ids(
        self: Any, input_ids: Any, multimodal_embeddings: Any = None, **named: Any
    ) -> Any:
        """See vLLM's."""
        sounds = [list(multimodal_embeddings)] if multimodal_embeddings else None
        return embed(self, input_ids, sounds, **named)

    kind.embed_input_ids = embed_input_ids


def load_model_cls(self: Any) -> Any:
    """See vLLM's, which calls it more than once."""
    kind = _load(self)
    if self.class_name == _MODEL and kind.embed_input_ids.__module__ != __name__:
        embed_all(kind)
    return kind


_LazyRegisteredModel.load_model_cls = load_model_cls
vars(utils)["_can_batch_mm_items"] = can_batch

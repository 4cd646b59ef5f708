"""Encode media in one step only where the model takes them together.

vLLM gives a model the media of a step as one tensor, padded with zeros, or as a list. Kimi-Audio
takes no list, nor MiniCPM-o one of the lengths of a sound's pieces of 30 seconds, and Granite 4
Vision counts the padding of a request's smaller pictures in one: two clients' media of different
shapes in one step ended one engine after the other. Nemotron's films of different shapes were
answered wrongly, since vLLM's second model runner pads their frames. Of sounds that were encoded,
Kimi-Audio puts only the first into its prompt, and would fill its last tokens with the beginning of
the next: other clients were answered as if they had sent none, or with parts of others' sounds.
"""

from math import nan
from typing import Any, Final

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from vllm.model_executor.models.registry import _LazyRegisteredModel
from vllm.multimodal import utils
from vllm.multimodal.inputs import MultiModalKwargsItem

_STACKED: Final = ("whisper_input_features", "audio_feature_lens", "pixel_values_flat_video")
"""Tensors of media of Kimi-Audio, MiniCPM-o and Nemotron; InternVL's films have the last, too."""

_load = _LazyRegisteredModel.load_model_cls
_can_batch = utils._can_batch_mm_items


def can_batch(left: MultiModalKwargsItem, right: MultiModalKwargsItem) -> bool:
    """See vLLM's."""
    if not _can_batch(left, right):
        return False
    stacked = [(left[name].data, right[name].data) for name in _STACKED if name in left]
    return all(each.shape == other.shape for each, other in stacked)


def embed_all(kind: Any) -> None:
    """Have a class put the embeddings of all sounds into prompts, which it takes in one list.

    A sound has more tokens than embeddings: a row of NaN stands for each without one.
    """
    encode, embed = kind.embed_multimodal, kind.embed_input_ids

    def embed_multimodal(self: Any, **media: Any) -> Any:
        """See vLLM's."""
        return [pad(each, (0, 0, 0, len(each)), value=nan) for each in encode(self, **media)]

    def embed_input_ids(
        self: Any, input_ids: Any, multimodal_embeddings: Any = None, *, is_multimodal: Any = None
    ) -> Any:
        """See vLLM's."""
        if not multimodal_embeddings:
            return embed(self, input_ids)
        sounds = torch.cat(list(multimodal_embeddings))
        heard = ~sounds[:, 0].isnan()
        places = is_multimodal.clone()
        places[is_multimodal] = heard.to(places.device)
        return embed(self, input_ids, [sounds[heard]], is_multimodal=places)

    kind.embed_multimodal, kind.embed_input_ids = embed_multimodal, embed_input_ids


def pad_all(kind: Any) -> None:
    """Have a class get all pictures in one tensor, whose padding it leaves out."""
    embed = kind.embed_multimodal

    def embed_multimodal(self: Any, **media: Any) -> Any:
        """See vLLM's."""
        if isinstance(pictures := media.get("pixel_values"), list):
            media["pixel_values"] = pad_sequence(pictures, batch_first=True)
        return embed(self, **media)

    kind.embed_multimodal = embed_multimodal


_MENDS: Final = {
    "KimiAudioForConditionalGeneration": embed_all,
    "Granite4VisionForConditionalGeneration": pad_all,
}


def load_model_cls(self: Any) -> Any:
    """See vLLM's, which calls it more than once."""
    kind = _load(self)
    if mend := _MENDS.pop(self.class_name, None):
        mend(kind)
    return kind


_LazyRegisteredModel.load_model_cls = load_model_cls
vars(utils)["_can_batch_mm_items"] = can_batch

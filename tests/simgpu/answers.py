"""What a simulated engine answers: a function of what the prompt shows, and of nothing else."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import torch
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData


class Vocabulary:
    """Ordinary token ids: the middle half of the vocabulary but for the config's special ones."""

    def __init__(self, size: int, special: Iterable[int]) -> None:
        special = frozenset(special)
        self._ids = [i for i in range(size // 4, size - size // 4) if i not in special]

    @classmethod
    def of(cls, config: VllmConfig) -> "Vocabulary":
        """The vocabulary of the configured model."""
        model = config.model_config
        special = set[int]()
        for part in (model.hf_config, model.hf_text_config):
            for name, value in part.to_dict().items():
                if name.endswith("_token_id"):
                    special.update(value if isinstance(value, list) else [value])
        return cls(model.get_vocab_size(), special)

    def pick(self, seed: bytes, position: int) -> int:
        """The token at a position of the answer that a seed stands for."""
        digest = blake2b(position.to_bytes(4), key=seed, digest_size=8).digest()
        return self._ids[int.from_bytes(digest) % len(self._ids)]


class MediaContents:
    """What each media item shows, whatever it is called: servers name the same picture differently.

    An item's tensors come with it only until the engine holds them, so its digest is kept.
    """

    SAMPLES = 4096  # elements of the largest tensor that are looked at

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def digest(self, feature: MultiModalFeatureSpec) -> bytes:
        """A digest of an item's content; of its identifier if the content was never seen."""
        known = self._digests.get(feature.identifier)
        if known is not None:
            return known
        values = [field.data for field in (feature.data or {}).values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not tensors:
            return feature.identifier.encode()
        flat = max(tensors, key=torch.Tensor.numel).flatten()
        sample = flat[:: max(1, len(flat) // self.SAMPLES)].float().numpy()
        content = blake2b(sample.tobytes(), digest_size=16)
        content.update(len(flat).to_bytes(8))
        return self._digests.setdefault(feature.identifier, content.digest())


@dataclass(slots=True)
class SimRequest:
    """What is remembered of a request while it runs."""

    seed: bytes
    prompt_tokens: int
    encoder_tokens: list[int]  # of each media item
    sampling: SamplingParams | None = None

    @classmethod
    def of(cls, new: NewRequestData, media: MediaContents) -> "SimRequest":
        """Remember a request; its seed is the content of the prompt, media included."""
        content = blake2b(array("q", new.prompt_token_ids or ()).tobytes(), digest_size=16)
        for feature in new.mm_features:
            where = feature.mm_position
            content.update(f"{where.offset} {where.length} ".encode() + media.digest(feature))
        encoder_tokens = [feature.mm_position.get_num_embeds() for feature in new.mm_features]
        return cls(content.digest(), new.prompt_len, encoder_tokens, new.sampling_params)

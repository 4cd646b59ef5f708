"""Give each answer of a step its own log probabilities.

vLLM's first model runner has those of named tokens (``logprob_token_ids``), or those of the
likeliest ones, for all answers of a step: one small request had the ``top_logprobs`` of all other
clients be of token 0. With speculation it ended the engine.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

_sample = Sampler.forward
_gather = Sampler.gather_specific_token_logprobs


def sample(
    self: Any, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *args: Any, **options: Any
) -> SamplerOutput:
    """See vLLM's. Its rejection sampler asks for the logits of all tokens, and needs them."""
    if sampling_metadata.max_num_logprobs == -1:
        sampling_metadata = replace(sampling_metadata, logprob_token_ids=None)
    self.candidates = sampling_metadata.max_num_logprobs or 0
    return _sample(self, logits, sampling_metadata, *args, **options)


def gather(
    self: Any, logprobs: torch.Tensor, named: dict[int, list[int]], sampled: torch.Tensor
) -> LogprobsTensors | None:
    """See vLLM's. Answers that name no tokens have their likeliest ones."""
    others = [row for row in range(len(logprobs)) if row not in named]
    if others and self.candidates:
        likeliest = logprobs[others].topk(self.candidates).indices.tolist()
        named = named | dict(zip(others, likeliest, strict=True))
    return _gather(self, logprobs, named, sampled)


Sampler.forward = sample
Sampler.gather_specific_token_logprobs = gather

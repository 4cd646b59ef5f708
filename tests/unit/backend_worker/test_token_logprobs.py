"""An answer that names tokens changes the log probabilities of no other."""

from typing import Any

import pytest
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from backend_worker.engine import slow_structures
from backend_worker.engine.vllm_faults import token_logprobs

NAMED = {1: [7, 3, 5]}
LOGITS = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6, 7, 8]] * 3)


def sampled(candidates: int | None, **mode: Any) -> LogprobsTensors | None:
    """Return those of a step of three answers, of which the second names tokens."""
    none = torch.empty(0)
    metadata = SamplingMetadata(
        temperature=None, all_greedy=True, all_random=False, top_p=None, top_k=None, generators={},
        max_num_logprobs=candidates, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=none, presence_penalties=none, repetition_penalties=none,
        output_token_ids=[[], [], []], allowed_token_ids_mask=None, bad_words_token_ids={},
        logitsprocs=LogitsProcessors(), logprob_token_ids=NAMED,
    )  # fmt: skip
    found: LogprobsTensors | None = Sampler()(LOGITS, metadata, **mode).logprobs_tensors
    return found


@pytest.mark.parametrize("candidates", [None, 0, 2, 5])
def test_each_answer_of_a_step_has_its_own(candidates: int | None) -> None:
    assert slow_structures.WatchedStructuresConfig.__module__  # an engine's process imports it
    assert Sampler.forward is token_logprobs.sample
    found = sampled(candidates)
    assert found is not None
    assert found.logprob_token_ids[1].tolist()[:4] == [8, *NAMED[1]]
    assert found.logprobs[1][:4].isfinite().all()
    for row in (0, 2):
        most = 1 + (candidates or 0)
        assert found.logprob_token_ids[row].tolist()[:most] == [8, 8, 7, 6, 5, 4][:most]
        assert torch.equal(
            found.logprobs[row][:most], LOGITS.log_softmax(-1)[row][[8, 8, 7, 6, 5, 4]][:most]
        )


def test_a_rejection_sampler_gets_the_logits_of_all_tokens() -> None:
    found = sampled(-1, logprobs_mode_override="raw_logits")
    assert found is not None and torch.equal(found.logprobs, LOGITS)

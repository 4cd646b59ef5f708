"""Log-probabilities of simulated answers: of the right shape, and of no meaning."""

from collections.abc import Sequence

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists


def logprobs_of(
    asked: Sequence[SamplingParams | None], sampled: Sequence[list[int]], vocabulary: int
) -> LogprobsLists | None:
    """Return those of a step; None if no request wants any.

    Args:
        asked: by each request.
        sampled: the token of each, or none.
        vocabulary: ids that there are.
    """
    wanted = [each.num_logprobs if each else None for each in asked]
    if all(count is None for count in wanted):
        return None
    counts = [vocabulary if count == -1 else count or 0 for count in wanted]
    width = 1 + max(counts)
    ids = np.zeros((len(asked), width), dtype=np.int64)
    for row, (request, tokens) in enumerate(zip(asked, sampled, strict=True)):
        first = tokens[0] if tokens else 0
        ids[row] = (first + np.arange(width)) % vocabulary
        named = (request.logprob_token_ids if request else None) or []
        ids[row, 1 : 1 + len(named)] = named
    falling = -np.arange(1, width + 1, dtype=np.float32)
    return LogprobsLists(
        ids, np.tile(falling, (len(asked), 1)), np.ones(len(asked), dtype=np.int64)
    )

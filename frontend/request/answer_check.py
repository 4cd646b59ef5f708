"""Check that a worker's answer is no more than was asked for, and no less.

vLLM's server trusts an engine: an endless answer fills its memory, 300,000 candidates for a token
block the event loop, and a missing log probability is a 500.
"""

from typing import Final

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import SamplingParams

from common.errors import WorkerGarbledError
from common.request_plane.protocol import Output
from frontend.request.answer_limits import candidates
from frontend.workers import Logprobs

MAX_TOKEN_TEXT: Final = 4096
"""Characters of a token, on average of an answer; the longest of vocabularies have hundreds."""

MAX_EXPERT_BYTES: Final = 4096
"""Bytes of a token's routed experts: 61 layers of 8 take 488, or 1,952 as 32-bit numbers."""

MAX_CHOICE_EXPERT_BYTES: Final = 16 << 20
"""Bytes of a choice's routed experts. Written as text, 80 MB took the event loop 3.7 seconds."""

MAX_EMPTY: Final = 64
"""Outputs without a token, beside one for each choice and each token of the prompt: an engine may
give one for each piece of a prefill."""


class AnswerCheck:
    """Check the answer of one worker to one request."""

    def __init__(self, params: SamplingParams | None, prompt_tokens: int = 0) -> None:
        """Without ``params`` the request pools, unchecked. ``prompt_tokens`` include media."""
        params = params or SamplingParams()
        self._most_tokens = params.n * params.max_tokens if params.max_tokens else None
        self._asked = params.num_logprobs is not None
        self._candidates = candidates(params.logprobs, params.logprob_token_ids)
        # Given by tokens (vLLM 0.33), each place of a prompt has its own.
        by_tokens = getattr(params, "prompt_logprob_token_ids", None) is not None
        self._of_prompt = None if by_tokens else candidates(params.prompt_logprobs)
        self._characters = 0
        self._may_be_empty = MAX_EMPTY + params.n + prompt_tokens
        self._prompt_tokens = prompt_tokens

    def check(self, output: Output, tokens: int) -> None:
        """Raise WorkerGarbledError for a wrong output. ``tokens`` counts all choices, up to its
        end.
        """
        if self._most_tokens is not None and tokens > self._most_tokens:
            raise WorkerGarbledError("a worker said more tokens than were asked for")
        if tokens == self._most_tokens and not _ends(output):
            # The rest, of no token, would be blamed on the next worker, which can't take it.
            raise WorkerGarbledError("a worker said all tokens and did not end the answer")
        for one in output.outputs:
            self._characters += len(one.text)
            if not self._asked:
                if one.logprobs:
                    raise WorkerGarbledError(
                        "a worker sent log probabilities that the request did not ask for"
                    )
            elif len(one.logprobs or ()) < len(one.token_ids):
                raise WorkerGarbledError("a worker left out log probabilities that were asked for")
            _check_width(one.logprobs, self._candidates)
            if one.routed_experts is not None:
                self._check_experts(one.routed_experts.nbytes, tokens)
        if self._characters > MAX_TOKEN_TEXT * (tokens + 1):
            raise WorkerGarbledError("a worker said more text than its tokens can have")
        # An engine that computes none has one place, for the first token, which never has any.
        if (places := len(output.prompt_logprobs or ())) not in (0, 1, self._prompt_tokens):
            raise WorkerGarbledError(
                f"a worker gave log probabilities of {places} tokens of a "
                f"prompt that has {self._prompt_tokens}"
            )
        if self._of_prompt is not None:
            _check_width(output.prompt_logprobs, self._of_prompt)

    def count_empty(self) -> None:
        """Count an output without a token. Raises WorkerGarbledError if there are too many."""
        self._may_be_empty -= 1
        if self._may_be_empty < 0:
            raise WorkerGarbledError("a worker said nothing too often")

    def _check_experts(self, nbytes: int, tokens: int) -> None:
        """Engines with ``--enable-return-routed-experts`` give them, though no request asks."""
        if nbytes > min((self._prompt_tokens + tokens) * MAX_EXPERT_BYTES, MAX_CHOICE_EXPERT_BYTES):
            raise WorkerGarbledError(
                f"a worker gave {nbytes} bytes of routed experts, more than an answer may have"
            )


def _ends(output: Output) -> bool:
    return output.finished or any(one.finish_reason is not None for one in output.outputs)


def _check_width(logprobs: Logprobs | None, most: int) -> None:
    if not logprobs:
        return
    if isinstance(logprobs, FlatLogprobs):
        there = len(logprobs.logprobs)
    else:
        there = max(len(position or ()) for position in logprobs) * len(logprobs)
    if there > most * len(logprobs):
        raise WorkerGarbledError("a worker gave more log probabilities than were asked for")

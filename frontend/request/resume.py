"""Continue an answer on another worker, without a token or a letter repeated or lost.

A :class:`Resume` has the request for the next worker, and turns its answer into what follows the
:class:`GeneratedSoFar`:

- :class:`Beginning`: nothing was answered; the request as it is.
- :class:`Continuation`: the tokens so far become the end of the prompt. Right if the next token
  depends on nothing but the tokens before it.
- :class:`Regeneration`: a replay of the request, of which the known part is skipped. Costs its
  computation again. Right if outputs repeat: under greedy and under seeded sampling, even if the
  worker keeps state (random generator, token counts, grammar). Each token is compared.

The only file that touches vLLM's detokenizer. A continuation needs one of its own. The state of the
lost one (bytes of an unfinished letter, text held back for a possible stop string) follows from the
original prompt and the tokens so far.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from common.errors import NotResumableError
from common.request_plane.protocol import Submit

_MAX_LETTER_LEN = 4
"""Tokens that one letter of UTF-8 may span."""


@dataclass
class GeneratedChoice:
    """Output of one of the ``n`` choices so far."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finished: bool = False

    @property
    def text(self) -> str:
        """The text so far, joined on demand: at each token a long text would be copied."""
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0]


class GeneratedSoFar:
    """Output of a request so far."""

    def __init__(self) -> None:
        self.choices: dict[int, GeneratedChoice] = {}

    def add(self, outputs: Sequence[CompletionOutput]) -> None:
        """Add outputs, which are deltas."""
        for output in outputs:
            choice = self.choices.get(output.index)
            if choice is None:
                choice = self.choices[output.index] = GeneratedChoice()
            choice.token_ids += output.token_ids
            choice.pieces.append(output.text)
            choice.cumulative_logprob = output.cumulative_logprob
            choice.finished = output.finish_reason is not None

    @property
    def length(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def clear(self) -> None:
        """Forget output that no client has seen."""
        self.choices.clear()


class Resume(ABC):
    """One attempt: ``submit`` is the worker's request, ``how`` a constant for counters."""

    how: str
    submit: Submit

    @abstractmethod
    def join(self, outputs: Sequence[CompletionOutput]) -> list[CompletionOutput]:
        """Return outputs as deltas that add to earlier ones. Raises NotResumableError."""


class Beginning(Resume):
    """Nothing was answered yet."""

    how = "begun"

    def __init__(self, submit: Submit) -> None:
        self.submit = submit

    def join(self, outputs: Sequence[CompletionOutput]) -> list[CompletionOutput]:
        return list(outputs)


class Continuation(Resume):
    """The tokens so far are a part of the prompt."""

    how = "continued"

    def __init__(
        self, submit: Submit, choice: GeneratedChoice, tokenizer: TokenizerLike | None
    ) -> None:
        """Take a request with a prompt of tokens and one choice; some 10 µs per token so far.

        Raises:
            NotResumableError: the text so far doesn't follow from the tokens.
        """
        params = sampling_of(submit)
        self.submit = msgspec.structs.replace(
            submit,
            prompt_token_ids=[*(submit.prompt_token_ids or []), *choice.token_ids],
            sampling_params=_continued(params, len(choice.token_ids)),
        )
        self._logprob_before = choice.cumulative_logprob
        self._detokenizer = IncrementalDetokenizer.from_new_request(
            tokenizer if params.detokenize else None,
            EngineCoreRequest(
                request_id=submit.request_id,
                prompt_token_ids=submit.prompt_token_ids,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
        )
        self._detokenizer.update(list(choice.token_ids), False)
        if self._detokenizer.get_next_output_text(False, True) != choice.text:
            raise NotResumableError("its text doesn't follow from its tokens")

    def join(self, outputs: Sequence[CompletionOutput]) -> list[CompletionOutput]:
        return [self._follow(output) for output in outputs]

    def _follow(self, output: CompletionOutput) -> CompletionOutput:
        """Derive text and stop strings from tokens, as vLLM's output processor does."""
        before = self._detokenizer.num_output_tokens()
        stop = self._detokenizer.update(list(output.token_ids), output.finish_reason == "stop")
        kept = self._detokenizer.num_output_tokens() - before  # a stop string drops what follows
        finish_reason = "stop" if stop else output.finish_reason
        total = output.cumulative_logprob
        if total is not None and self._logprob_before is not None:
            total += self._logprob_before
        return replace(
            output,
            token_ids=output.token_ids[:kept],
            text=self._detokenizer.get_next_output_text(finish_reason is not None, True),
            logprobs=output.logprobs and output.logprobs[:kept],
            cumulative_logprob=total,
            finish_reason=finish_reason,
            stop_reason=stop or output.stop_reason,
            weight_versions=None,  # counts from the resume
        )


class Regeneration(Resume):
    """A replay of the answer; its known part is compared and skipped."""

    how = "replayed"

    def __init__(self, submit: Submit, generated: GeneratedSoFar) -> None:
        self.submit = submit
        self._before = copy.deepcopy(generated.choices)
        self._again = GeneratedSoFar()

    def join(self, outputs: Sequence[CompletionOutput]) -> list[CompletionOutput]:
        fresh = [self._skip(output) for output in outputs]
        return [output for output in fresh if output is not None]

    def _skip(self, output: CompletionOutput) -> CompletionOutput | None:
        before = self._before.get(output.index, GeneratedChoice())
        known = self._again.choices.get(output.index, GeneratedChoice())
        tokens = before.token_ids[len(known.token_ids) :][: len(output.token_ids)]
        text = before.text[len(known.text) :][: len(output.text)]
        self._again.add([output])
        again = self._again.choices[output.index]
        if (
            list(output.token_ids[: len(tokens)]) != tokens
            or not output.text.startswith(text)
            or (output.finished() and len(again.token_ids) < len(before.token_ids))
        ):
            raise NotResumableError("another worker answered something else")
        if before.finished:
            return None
        if len(tokens) == len(output.token_ids) and not output.finished() and text == output.text:
            return None
        return replace(
            output,
            token_ids=output.token_ids[len(tokens) :],
            text=output.text[len(text) :],
            logprobs=output.logprobs and output.logprobs[len(tokens) :],
        )


def sampling_of(submit: Submit) -> SamplingParams:
    """Return the parameters of a request that generates; pooled answers are never resumed."""
    assert submit.sampling_params is not None
    return submit.sampling_params


def plan_resume(
    submit: Submit, generated: GeneratedSoFar, tokenizer: TokenizerLike | None, *, seen: bool
) -> Resume:
    """Choose how an answer goes on; see :class:`Continuation` on the time it takes.

    Args:
        seen: whether the client has seen output; unseen output may be discarded.

    Raises:
        NotResumableError: it can't; the message says why.
    """
    if not generated.choices:
        return Beginning(submit)
    state = _state_of_its_own(submit, generated, tokenizer)
    if state is None:
        return Continuation(submit, generated.choices[0], tokenizer)
    if not seen:
        generated.clear()
        return Beginning(submit)
    params = sampling_of(submit)
    if params.output_kind is not RequestOutputKind.DELTA:
        raise NotResumableError("it is no stream of deltas")
    if params.temperature == 0 or params.seed is not None:
        return Regeneration(submit, generated)
    raise NotResumableError(f"{state}, and it is neither greedy nor seeded")


def _state_of_its_own(
    submit: Submit, generated: GeneratedSoFar, tokenizer: TokenizerLike | None
) -> str | None:
    """Return what a worker remembers of an answer beside its tokens, as a part of a sentence."""
    params = sampling_of(submit)
    if set(generated.choices) != {0}:
        return "it has several answers"
    if params.num_logprobs is not None and _mid_letter(generated.choices[0], tokenizer):
        return "it has log probabilities and was lost amid a letter"
    states = {
        "it has several answers": params.n != 1,
        "it is no stream of deltas": params.output_kind is not RequestOutputKind.DELTA,
        "its prompt has embeddings": submit.prompt_embeds is not None,
        "a seeded random generator can't be moved": (
            params.seed is not None and params.temperature > 0
        ),
        "its presence or frequency penalty counts what was answered": (
            params.presence_penalty != 0 or params.frequency_penalty != 0
        ),
        "its output has a structure": params.structured_outputs is not None,
        "it has words that are forbidden": bool(params.bad_words),
        "its thinking has a budget": params.thinking_token_budget is not None,
        "repetition ends it": params.repetition_detection is not None,
        "it is watermarked": bool(params.watermarking),
        "it has arguments for plug-ins": bool(params.extra_args),
        "its tokens are given": params.trace_decode_token_ids is not None,
    }
    return next((reason for reason, applies in states.items() if applies), None)


def _mid_letter(choice: GeneratedChoice, tokenizer: TokenizerLike | None) -> bool:
    """Return whether the last token ends within a letter, so that the next label needs it."""
    last = choice.token_ids[-_MAX_LETTER_LEN:]
    return tokenizer is not None and str(tokenizer.decode(last)).endswith("�")


def _continued(params: SamplingParams, count: int) -> SamplingParams:
    """Return the parameters for the rest of an answer."""
    left: SamplingParams = copy.copy(params)
    if left.max_tokens is not None:
        left.max_tokens -= count
    left.min_tokens = max(0, left.min_tokens - count)
    left.stop = []  # found here, since a stop string may have begun before it was resumed
    left.output_text_buffer_length = 0
    left.prompt_logprobs = None  # given before
    left.prompt_logprob_token_ids = None
    left.prompt_logprob_start = None
    return left

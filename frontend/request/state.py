"""State of one ``generate`` or ``encode`` call: its progress, attempts and output."""

import asyncio
import copy
import logging
import math
import time
from typing import TypeAlias

import msgspec
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import TokenizerLike

from common.errors import MmRouterError, WorkerGarbledError
from common.identity import WorkerId
from common.observability.telemetry import (
    INTER_TOKEN_LATENCY,
    MIGRATIONS,
    REQUEST_SECONDS,
    RETRIES,
    TIME_TO_FIRST_TOKEN,
)
from common.request_plane.lifecycle import Event, Lifecycle, State
from common.request_plane.protocol import MAX_POOLED_BYTES, Output, Submit
from frontend.processing import ProcessedPrompt
from frontend.request.answer_check import AnswerCheck
from frontend.request.deadlines import Deadlines
from frontend.request.direct_events import DirectEvents
from frontend.request.resume import Beginning, Continuation, GeneratedSoFar, Resume, plan_resume
from frontend.request.retry import Attempts
from frontend.request.spans import CallSpans
from frontend.request_context import current_context

logger = logging.getLogger(__name__)

AnyOutput: TypeAlias = RequestOutput | PoolingRequestOutput
"""Output of a request that generates, or of one that pools."""

GATHER_INTERVAL = 16
"""Tokens per output of an answer that the client gets only at its end."""


class RequestState:
    """One request of a client. Its answer may come from several workers in turn.

    Workers always stream, even if vLLM's server wants only the end: then a lost worker costs less,
    a stalled one is noticed, and leased memory comes back at the first token. The outputs are
    gathered here.
    """

    def __init__(
        self,
        submit: Submit,
        client_id: str,
        prompt: ProcessedPrompt,
        lifecycle: Lifecycle,
        attempts: Attempts,
        deadlines: Deadlines,
        tokenizer: TokenizerLike | None,
        spans: CallSpans,
    ) -> None:
        """``submit`` has an id of ours; ``client_id`` goes on outputs and into logs."""
        params = submit.sampling_params
        self._gathers = params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY
        if params is not None:
            params = _for_engine(params, gathers=self._gathers)
            submit = msgspec.structs.replace(submit, sampling_params=params)
        self.client_id = client_id
        self.prompt = prompt
        self.lifecycle = lifecycle
        self.attempts = attempts
        self.deadlines = deadlines
        self.spans = spans
        self.resume: Resume = Beginning(submit)
        self._original = submit
        self._pools = params is None
        self._check = AnswerCheck(params, len(prompt.token_ids))
        self._choices = 0 if params is None else params.n
        self._alone = self._choices == 1
        self._blank = vars(
            RequestOutput(
                request_id=client_id,
                prompt=submit.prompt_text,
                prompt_token_ids=prompt.token_ids,
                prompt_logprobs=None,
                outputs=[],
                finished=False,
                lora_request=prompt.lora_request,
            )
        )
        context = current_context()
        self._arrived = context.arrived or time.perf_counter()
        self._last_output = 0.0
        self._tokenizer = tokenizer
        self._place = 0  # tokens of the answer that the current worker generated or was given
        self._generated = GeneratedSoFar()
        self._gathered = GatheredAnswer()
        self._events = context.find(DirectEvents) if self._alone and not self._gathers else None
        if self._events is not None and not self._events.claim():
            self._events = None
        self._taken = 0  # tokens that bypassed vLLM's server
        self._waits = False
        lifecycle.on(Event.PREPARED)

    async def failed(self, worker_id: WorkerId, error: MmRouterError) -> None:
        """Set ``resume`` for another worker, or raise MmRouterError if there is to be none."""
        place, self._place = self._place, 0
        self._check = AnswerCheck(self._original.sampling_params, len(self.prompt.token_ids))
        self._waits = False
        self.attempts.failed(worker_id, error, place=place)
        self.lifecycle.on(Event.WORKER_FAILED)
        logger.warning("request %s goes to another worker: %s", self._name, error)
        if not self.lifecycle.answered:
            RETRIES.labels(type(error).__name__).inc()
            self.spans.moves(worker_id, error, "retry")
            return
        self.resume = await asyncio.to_thread(
            plan_resume,
            self._original,
            self._generated,
            self._tokenizer,
            seen=not self._gathers,
        )
        if isinstance(self.resume, Beginning):
            self._gathered = GatheredAnswer()
        elif isinstance(self.resume, Continuation):
            self._place = self._generated.length
        MIGRATIONS.labels(self.resume.how).inc()
        self.spans.moves(worker_id, error, self.resume.how)

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._generated.length

    @property
    def _name(self) -> str:
        """The worker's id of the request and the client's, for logs."""
        return f"{self._original.request_id} ({self.client_id[:80]!r})"

    async def wait(self, arrival: asyncio.Event, until: float) -> None:
        """Wait for a worker to join, or until a moment by the event loop's clock.

        Raises:
            DeadlineExceededError: the request's own time is over before that.
        """
        if not self._waits:
            logger.warning("request %s waits for a worker", self._name)
        self._waits = True
        left = self.deadlines.left_s()
        late = math.inf if left is None else asyncio.get_running_loop().time() + left
        try:
            async with asyncio.timeout_at(min(late, until)):
                await arrival.wait()
        except TimeoutError as error:
            if late < until:
                raise self.deadlines.late() from error

    def answer(self, output: Output) -> AnyOutput | None:
        """Return a worker's output as vLLM's; None if it says nothing (yet).

        Raises:
            NotResumableError: it doesn't follow what was answered before.
            WorkerGarbledError: it is no answer to the request.
        """
        if self._pools or output.pooled is not None:
            return self._pooled(output)
        now, tokens = time.perf_counter(), 0
        for one in output.outputs:
            if not 0 <= one.index < self._choices:
                raise WorkerGarbledError("a worker said something of an answer that was not asked")
            tokens += len(one.token_ids)
        if output.finished and not output.outputs:
            raise WorkerGarbledError("a worker ended a request without a word")
        self._place += tokens
        if not tokens:
            self._check.count_empty()
        self._check.check(output, self._place)
        state = self.lifecycle.state
        first = state is not State.STREAMING and not self.lifecycle.answered
        outputs = self.resume.join(output.outputs)
        finished = output.finished
        if self._alone and not finished:
            for one in outputs:
                finished = finished or one.finish_reason is not None
        if finished or state is not State.STREAMING:
            self.lifecycle.on(Event.LAST_OUTPUT if finished else Event.OUTPUT)
        if first:
            TIME_TO_FIRST_TOKEN.observe(now - self._arrived)
            self._blank["num_cached_tokens"] = output.num_cached_tokens
            self._blank["num_cache_creation_tokens"] = output.num_cache_creation_tokens
        elif self._alone and tokens:
            INTER_TOKEN_LATENCY.observe((now - self._last_output) / tokens, tokens)
        self._last_output = now
        if finished:
            REQUEST_SECONDS.observe(now - self._arrived)
        self._generated.add(outputs)
        answer = RequestOutput.__new__(RequestOutput)  # its constructor takes a third of all this
        fields = vars(answer)
        fields.update(self._blank)
        fields["outputs"] = outputs
        fields["finished"] = finished
        fields["metrics"] = output.metrics
        fields["kv_transfer_params"] = output.kv_transfer_params
        if output.prompt_logprobs is not None and isinstance(self.resume, Beginning):
            answer.prompt_logprobs = output.prompt_logprobs
        if self._gathers:
            return self._gathered.add(answer)
        if self._events is not None and outputs:
            self._tell(outputs[0], self._events)
        return answer if outputs or finished else None

    def take(self, output: Output) -> bool:
        """Send an output that is only text straight to the client; return whether it was sent."""
        events = self._events
        if (
            events is None
            or len(output.outputs) != 1
            or output.finished
            or output.prompt_logprobs is not None
            or output.kv_transfer_params is not None
            or output.pooled is not None
            or self.lifecycle.state is not State.STREAMING
            or type(self.resume) is not Beginning
        ):
            return False
        one = output.outputs[0]
        if (
            one.finish_reason is not None
            or one.stop_reason is not None
            or one.logprobs is not None
            or one.index
            or not (one.text or one.token_ids)  # to vLLM a piece of the prefill
        ):
            return False
        tokens = len(one.token_ids)
        self._check.check(output, self._place + tokens)
        if not events.send(one.text, self._place + tokens):
            return False
        now = time.perf_counter()
        if tokens:
            INTER_TOKEN_LATENCY.observe((now - self._last_output) / tokens, tokens)
        self._last_output = now
        self._place += tokens
        self._taken += tokens
        self._generated.add(output.outputs)
        return True

    def _tell(self, one: CompletionOutput, events: DirectEvents) -> None:
        """Let vLLM's server count the tokens of the outputs that bypassed it."""
        events.gives(one.text, self._place)
        if self._taken:
            said = self._generated.choices[one.index].token_ids
            one.token_ids = said[len(said) - self._taken - len(one.token_ids) :]
            self._taken = 0

    def _pooled(self, output: Output) -> PoolingRequestOutput:
        if output.pooled is None or not self._pools or not output.finished:
            raise WorkerGarbledError("a worker generated what was to be pooled, or the reverse")
        if output.pooled.nbytes > MAX_POOLED_BYTES:
            raise WorkerGarbledError("a worker pooled more than an answer may have")
        self.lifecycle.on(Event.LAST_OUTPUT)
        REQUEST_SECONDS.observe(time.perf_counter() - self._arrived)
        return PoolingRequestOutput(
            request_id=self.client_id,
            outputs=PoolingOutput(output.pooled),
            prompt_token_ids=self.prompt.token_ids,
            num_cached_tokens=output.num_cached_tokens or 0,
            finished=True,
        )


def _for_engine(params: SamplingParams, *, gathers: bool) -> SamplingParams:
    changed: SamplingParams = copy.copy(params)
    if gathers:
        changed.output_kind = RequestOutputKind.DELTA
        changed.stream_interval = max(GATHER_INTERVAL, params.stream_interval or 1)
    # Lists of numbers instead of an object for each candidate: the garbage collector would scan a
    # million objects, which wait for the end of an answer, again and again. vLLM's server can't
    # read flat log probabilities of prompts.
    changed.flat_logprobs = params.prompt_logprobs is None
    return changed


class GatheredAnswer:
    """Gathers all choices of a request, at a cost that grows with their length alone.

    vLLM's merge looks through all choices of an output for each piece, so each choice is kept in an
    output of its own.
    """

    def __init__(self) -> None:
        self._whole: RequestOutput | None = None
        self._choices: dict[int, RequestOutput] = {}

    def add(self, piece: RequestOutput) -> RequestOutput | None:
        """Add a piece, which is consumed. Return the answer after the last, choices in order."""
        outputs, piece.outputs = piece.outputs, []
        if self._whole is None:
            self._whole = piece
        else:
            self._whole.add(piece, aggregate=True)
            self._whole.metrics = piece.metrics
        for output in outputs:
            choice = _only(output)
            known = self._choices.setdefault(output.index, choice)
            if known is not choice:
                _move_logprobs(output, known.outputs[0])
                known.add(choice, aggregate=True)
        if not self._whole.finished:
            return None
        self._whole.outputs = [choice.outputs[0] for _, choice in sorted(self._choices.items())]
        return self._whole


def _move_logprobs(piece: CompletionOutput, whole: CompletionOutput) -> None:
    """Append flat log probabilities, of which vLLM would make objects."""
    more, found = piece.logprobs, whole.logprobs
    if not isinstance(more, FlatLogprobs) or not isinstance(found, FlatLogprobs):
        return
    before = len(found.logprobs)
    found.start_indices += [before + each for each in more.start_indices]
    found.end_indices += [before + each for each in more.end_indices]
    found.token_ids += more.token_ids
    found.logprobs += more.logprobs
    found.ranks += more.ranks
    found.decoded_tokens += more.decoded_tokens
    piece.logprobs = None


def _only(output: CompletionOutput) -> RequestOutput:
    return RequestOutput(
        request_id="",
        prompt=None,
        prompt_token_ids=None,
        prompt_logprobs=None,
        outputs=[output],
        finished=False,
    )

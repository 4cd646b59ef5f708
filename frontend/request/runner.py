"""A request from a prompt to an answer: six steps, from the second again if a worker is lost."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import torch
from vllm.engine.protocol import StreamingInput
from vllm.exceptions import VLLMError
from vllm.inputs import EngineInput, PromptType
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest

from common.aio.cleanup import undo_on_error
from common.errors import (
    FleetBusyError,
    MmRouterError,
    NoWorkerError,
    ProtocolError,
    RequestRejectedError,
    RetryBudgetError,
    TransferError,
    WorkerGarbledError,
)
from common.identity import MmHash, RequestId, WorkerId
from common.observability.telemetry import MEDIA_ITEMS, REQUESTS, stage
from common.request_plane.lifecycle import Event, Lifecycle
from common.request_plane.protocol import MAX_NEW_BLOCKS, Ack, Failed, Nack, Output, Submit
from common.transfer.base import MediaHandle
from common.vllm_compat import text_streams
from frontend.processing import MediaItem, ProcessedPrompt
from frontend.request.answer_limits import check_choices, check_logprobs, check_structure
from frontend.request.call_gate import batch_of_request
from frontend.request.deadlines import Deadlines
from frontend.request.retry import DEADLY, DEADLY_TENSORS, Attempts, RetryBudget, failure
from frontend.request.settings import FaultSettings
from frontend.request.spans import CallSpans, new_request_id
from frontend.request.state import AnyOutput, RequestState
from frontend.request_context import current_context
from frontend.router import (
    Decision,
    LoraKey,
    MediaMove,
    MediaNeed,
    MediaSpan,
    PromptEmbeds,
    Router,
    RoutingRequest,
)
from frontend.workers import Answer, MediaSender, WorkerLink

HASH_INLINE_TOKENS = 4096
"""Longer prompts, and embeddings, are hashed in a thread: 32 k tokens take milliseconds."""

POLL_INTERVAL_S = 0.5
"""Poll interval of a request that waits for a worker, in seconds."""

MAX_ASKED = 8
"""Times that a worker may ask for one medium; an honest one gives up before."""

_REASONS = {"not_held", "evicted", "engine_evicted"} | {
    each.__name__ for each in TransferError.__subclasses__()
}
"""Why workers ask for media: a closed list, since it labels metrics."""

MAX_ID_LEN = 1024
"""Characters of a client's id of its request. Every event of a stream repeats it: one of 16 MB
would stop the event loop at each token."""


class PromptProcessor(Protocol):
    """Turns a rendered prompt into what workers take."""

    @property
    def tokenizer(self) -> TokenizerLike | None:
        """The model's; None without one."""

    @property
    def vocabulary_size(self) -> int:
        """Tokens that the model can say."""

    async def process(
        self,
        prompt: EngineInput,
        params: SamplingParams | PoolingParams,
        request_id: RequestId,
        lora_request: LoRARequest | None,
        engines: int,
    ) -> ProcessedPrompt:
        """Validate a prompt and sort its media. Raises MmRouterError, or VLLMError if wrong."""


class Workers(Protocol):
    """The workers that may take a request."""

    @property
    def arrival(self) -> asyncio.Event:
        """Set once the next worker has joined, or none will any more."""

    @property
    def closed(self) -> bool:
        """Whether no worker will come any more, since this frontend is shutting down."""

    def check_available(self) -> None:
        """Raise NoWorkerError, with the known reason, if there is no worker."""

    def link(self, worker_id: WorkerId) -> WorkerLink:
        """Return the link to a worker. Raises WorkerLostError if it is gone."""

    def joined_since(self, worker_id: WorkerId, moment: float) -> bool:
        """Return whether a worker joined, or joined again, after a moment in monotonic seconds."""


@dataclass(frozen=True)
class GenerateRequest:
    """A request of vLLM's server to generate, or to pool.

    Attributes:
        prompt: rendered; anything else is rejected.
        sampling_params: None to pool by ``pooling_params``.
        client_id: the client's, who may choose one that exists: it names only outputs, log lines
            and decisions.
        rank: the data-parallel rank, if the client chose one.
        deadlines: begun earlier; None to begin now.
    """

    prompt: EngineCoreRequest | PromptType | EngineInput | AsyncGenerator[StreamingInput, None]
    sampling_params: SamplingParams | None
    client_id: str
    prompt_text: str | None = None
    lora_request: LoRARequest | None = None
    trace_headers: Mapping[str, str] | None = None
    priority: int = 0
    rank: int | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    pooling_params: PoolingParams | None = None
    deadlines: Deadlines | None = None

    @property
    def params(self) -> SamplingParams | PoolingParams:
        return self.sampling_params or self.pooling_params


class RequestRunner:
    """Runs requests on the workers that already hold most of them."""

    def __init__(
        self,
        processor: PromptProcessor,
        workers: Workers,
        router: Router,
        media_sender: MediaSender,
        faults: FaultSettings,
        *,
        model: str = "",
    ) -> None:
        self._model = model
        self._processor = processor
        self._workers = workers
        self._router = router
        self._media_sender = media_sender
        self._faults = faults
        self.retry_budget = RetryBudget()
        text_streams.install()  # as in workers, or continued texts would differ

    async def run(
        self, request: GenerateRequest, computed: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[AnyOutput, None]:
        """Yield the answer; closing aborts. ``computed`` is called once its last output is here,
        read or not. Raises MmRouterError, or VLLMError if wrong.
        """
        lifecycle = Lifecycle()
        outcome = "aborted"  # unless we get to say something else
        own_id = new_request_id()
        spans = CallSpans(own_id, request.trace_headers)
        state: RequestState | None = None
        try:
            prompt = await self._process(request, own_id)
            state = self._begin(request, own_id, prompt, lifecycle, spans)
            while not lifecycle.ended:
                routing = await self._hash(state)
                decision = await self._select(state, routing)
                try:
                    with spans.attempt(decision):
                        link, handles = await self._send_media(state, decision)
                        answers = self._dispatch(state, decision, link, handles, computed)
                        stream = self._stream(state, decision, link, answers)
                        async with aclosing(stream) as outputs:
                            async for output in outputs:
                                yield output
                except MmRouterError as error:
                    self._router.in_flight.failed(decision, error)
                    await state.failed(decision.worker_id, error)
            outcome = "ok"
        except (MmRouterError, VLLMError) as error:
            outcome = type(error).__name__
            current_context().failed = True
            lifecycle.on(Event.ERROR)
            raise
        finally:
            if not lifecycle.ended:
                lifecycle.on(Event.CANCEL)
            REQUESTS.labels(outcome).inc()
            spans.ended(outcome, state.completion_tokens if state is not None else 0)

    def deadlines(self) -> Deadlines:
        """Return the deadlines of a request that begins now."""
        return Deadlines(self._faults)

    def _begin(
        self,
        request: GenerateRequest,
        own_id: RequestId,
        prompt: ProcessedPrompt,
        lifecycle: Lifecycle,
        spans: CallSpans,
    ) -> RequestState:
        tokens, media = len(prompt.token_ids or ()), len(prompt.media)
        spans.submitted(self._model, tokens, media, request.params)
        return RequestState(
            Submit(
                request_id=own_id,
                prompt_token_ids=prompt.tokens_sent,
                sampling_params=request.sampling_params,
                media=[item.part for item in prompt.media],
                shipments=[],
                prompt_text=request.prompt_text or prompt.prompt_text,
                prompt_embeds=prompt.prompt_embeds,
                prompt_is_token_ids=prompt.prompt_is_token_ids,
                cache_salt=prompt.cache_salt,
                lora_request=request.lora_request,
                priority=request.priority,
                rank=request.rank,
                reasoning_ended=request.reasoning_ended,
                reasoning_parser_kwargs=request.reasoning_parser_kwargs,
                pooling_params=request.pooling_params,
            ),
            request.client_id,
            prompt,
            lifecycle,
            Attempts(
                self._faults.migration_limit,
                self.retry_budget,
                worker_wait_s=self._faults.worker_wait_s,
                deadly=DEADLY_TENSORS if prompt.has_client_tensors else DEADLY,
            ),
            request.deadlines or self.deadlines(),
            self._processor.tokenizer,
            spans,
        )

    async def _process(self, request: GenerateRequest, own_id: RequestId) -> ProcessedPrompt:
        """Step 1. The renderer ran in vLLM's serving code; this validates and sorts."""
        if len(request.client_id) > MAX_ID_LEN:
            raise RequestRejectedError(
                f"the id of a request may have {MAX_ID_LEN} characters at most"
            )
        prompt = request.prompt
        if not isinstance(prompt, dict) or "type" not in prompt:
            raise RequestRejectedError("only prompts that vLLM's renderer made can be routed")
        check_structure(request.params)
        with stage("process"):
            processed = await self._processor.process(
                prompt,
                request.params,
                own_id,
                request.lora_request,
                self._router.load.engines,
            )
        check_choices(request.params, len(processed.token_ids), len(processed.media))
        check_logprobs(request.params, len(processed.token_ids), self._processor.vocabulary_size)
        return processed

    async def _hash(self, state: RequestState) -> RoutingRequest:
        """Step 2. ``block_mm_infos`` and vLLM's own block hashes."""
        prompt, submit = state.prompt, state.resume.submit
        lora = prompt.lora_request
        request = RoutingRequest(
            request_id=submit.request_id,
            token_ids=hashed_tokens(submit),
            media=[
                MediaNeed(
                    item.part.mm_hash,
                    MediaSpan(item.identifier, item.part.offset, item.part.length),
                    item.num_embeds,
                    item.nbytes,
                )
                for item in prompt.media
            ],
            lora=None if lora is None else LoraKey(lora.lora_name, lora.lora_path),
            cache_salt=prompt.cache_salt,
            embeds=hashed_embeds(submit),
            reads_cache=_reads_cache(submit),
            client_id=state.client_id,
            choices=submit.choices,
        )
        with stage("hash"):
            if len(request.token_ids) > HASH_INLINE_TOKENS or request.embeds:
                hashes = await asyncio.to_thread(self._router.hash, request)
            else:
                hashes = self._router.hash(request)
        return dataclasses.replace(request, hashes=hashes)

    async def _select(self, state: RequestState, routing: RoutingRequest) -> Decision:
        """Step 3. The worker with the lowest cost, among those that did not fail on it.

        A request that lost its worker waits for another one, and for the retry budget, since it was
        accepted once. So was a request of which a worker got another call.
        """
        now = asyncio.get_running_loop().time
        batch = batch_of_request()
        accepted = state.attempts.count > 0 or batch.accepted
        patience = now() + state.attempts.patience_s()
        while True:
            arrival = self._workers.arrival
            failed = state.attempts.failed_on(self._workers.joined_since)
            try:
                self._workers.check_available()
                state.attempts.pay()
                with stage("select"):
                    decision = self._router.route(routing, exclude=failed, accepted=accepted)
                batch.accepted = True
                return decision
            except RetryBudgetError as error:
                if self._workers.closed or now() >= patience:
                    raise
                until = min(patience, now() + error.wait_s)
            except (NoWorkerError, FleetBusyError) as error:
                if not accepted:
                    raise
                if self._workers.closed or now() >= patience:
                    # In no variable: this frame, which the traceback has, would keep the request.
                    raise state.attempts.take_failure() or NoWorkerError(str(error)) from error
                # An arrival wakes it; that a worker is resumed, reinstated or less busy does not.
                until = min(patience, now() + POLL_INTERVAL_S)
            await state.wait(arrival, until)

    async def _send_media(
        self, state: RequestState, decision: Decision
    ) -> tuple[WorkerLink, list[MediaHandle]]:
        """Step 4. The media that the worker lacks; an image shown twice goes once."""
        worker_id = decision.worker_id
        # If sending fails, the request must not count as in-flight there.
        with undo_on_error(partial(self._router.in_flight.finished, decision.request_id)):
            link = self._workers.link(worker_id)
            lacking: list[MediaItem] = []
            for mm_hash, item in state.prompt.items().items():
                if self._router.media.holds(worker_id, mm_hash):
                    decision.media.append(MediaMove(mm_hash, "held", 0, ""))
                else:
                    lacking.append(item)
            with stage("send"):
                handles = await self._media_sender.send(worker_id, lacking)
        _record(decision, handles, "shipped")
        return link, handles

    def _dispatch(
        self,
        state: RequestState,
        decision: Decision,
        link: WorkerLink,
        handles: list[MediaHandle],
        computed: Callable[[], None],
    ) -> AsyncGenerator[Answer]:
        """Step 5. Takes over the handles. Each attempt has a name of its own, since an
        earlier one on the same worker may still be ending."""
        submit, attempt = state.resume.submit, state.attempts.count
        take = None if state.deadlines.for_outputs else state.take  # a deadline needs each output
        state.lifecycle.on(Event.DISPATCHED)
        return link.dispatch(
            msgspec.structs.replace(
                submit,
                request_id=RequestId(f"{submit.request_id}-{attempt}")
                if attempt
                else submit.request_id,
                rank=decision.rank,
                prefill_tokens=decision.prefill_tokens,
                new_blocks=list(
                    self._router.in_flight.new_blocks(decision.request_id)[:MAX_NEW_BLOCKS]
                ),
                timeout_s=state.deadlines.left_s(),
                trace_headers=state.spans.headers(),
            ),
            handles,
            take,
            computed,
        )

    async def _stream(
        self,
        state: RequestState,
        decision: Decision,
        link: WorkerLink,
        answers: AsyncGenerator[Answer],
    ) -> AsyncGenerator[AnyOutput]:
        """Step 6. The worker's outputs as vLLM's; media it still lacks are supplied."""
        worker_id = decision.worker_id
        asked: Counter[MmHash] = Counter()
        cached_tokens: int | None = None
        growing = self._router.crowding.answer(decision, state.resume.submit.choices)
        try:
            async with aclosing(state.deadlines.watch(worker_id, answers)) as in_time:
                async for answer in in_time:
                    with _blaming(worker_id):
                        match answer:
                            case Output():
                                if cached_tokens is None:
                                    cached_tokens = answer.num_cached_tokens or 0
                                    self._first_output(state, decision, cached_tokens)
                                growing.grow(answer.outputs)
                                output = state.answer(answer)
                                if output is not None:
                                    yield output
                                if output is not None and output.finished:
                                    return
                            case Ack():
                                state.lifecycle.on(Event.ACK)
                                items = state.prompt.items()
                                held = [each for each in answer.held if each in items]
                                self._router.media.acked(worker_id, held)
                            case Nack():
                                state.lifecycle.on(Event.NACK)
                                await self._supply(state, decision, link, answer, asked)
                            case Failed():
                                raise failure(worker_id, answer)
        finally:
            growing.end()
            self._router.in_flight.finished(decision.request_id, served=cached_tokens is not None)

    def _first_output(self, state: RequestState, decision: Decision, cached_tokens: int) -> None:
        self._router.in_flight.first_token(decision.request_id, cached_tokens)
        state.spans.first_output(cached_tokens)

    async def _supply(
        self,
        state: RequestState,
        decision: Decision,
        link: WorkerLink,
        nack: Nack,
        asked: Counter[MmHash],
    ) -> None:
        """Send the worker the media that it lacks: as before, or inline if it asks again."""
        worker_id = decision.worker_id
        items = state.prompt.items()
        if not nack.missing or not items.keys() >= {*nack.missing}:
            raise ProtocolError("it asks for media that the prompt doesn't have, or for none")
        asked.update(nack.missing)
        if max(asked.values()) > MAX_ASKED:
            raise ProtocolError(f"it asks for a medium more than {MAX_ASKED} times")
        self._router.media.nacked(worker_id, nack.missing)
        again = any(asked[mm_hash] > 1 for mm_hash in nack.missing)
        lacking = [items[mm_hash] for mm_hash in nack.missing]
        handles = await self._media_sender.send(worker_id, lacking, inline=again)
        _record(decision, handles, nack.reason if nack.reason in _REASONS else "other")
        await link.supply(nack.request_id, handles)


@contextmanager
def _blaming(worker_id: WorkerId) -> Iterator[None]:
    """Raise a ProtocolError as WorkerGarbledError, so that another worker gets the request."""
    try:
        yield
    except ProtocolError as error:
        raise WorkerGarbledError(f"worker {worker_id}: {error}") from error


def _reads_cache(submit: Submit) -> bool:
    """Return whether the engine reads blocks of its cache, by its own rule."""
    sampling = submit.sampling_params
    if sampling is None:  # vectors of every token need every token
        return not (submit.pooling_params and submit.pooling_params.skip_reading_prefix_cache)
    return sampling.prompt_logprobs is None and not sampling.skip_reading_prefix_cache


def _record(decision: Decision, handles: Iterable[MediaHandle], how: str) -> None:
    for handle in handles:
        metadata = handle.metadata
        decision.media.append(MediaMove(metadata.mm_hash, how, metadata.nbytes, metadata.transport))
        MEDIA_ITEMS.labels(decision.worker_id, how).inc()


def hashed_tokens(submit: Submit) -> list[int]:
    """Return a token for each position, zero where an embedding stands."""
    tokens, places = submit.prompt_token_ids, submit.prompt_is_token_ids
    if submit.prompt_embeds is None:
        return tokens or []
    if tokens is None or places is None:
        return [0] * len(submit.prompt_embeds)
    return [token if kept else 0 for token, kept in zip(tokens, places, strict=True)]


def hashed_embeds(submit: Submit) -> PromptEmbeds | None:
    """Return the rows of embeddings, which enter every block; None for a prompt without any."""
    embeds = submit.prompt_embeds
    if embeds is None:
        return None
    return PromptEmbeds(embeds.flatten().contiguous().view(torch.uint8).numpy().data, len(embeds))

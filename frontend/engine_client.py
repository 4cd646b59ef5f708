"""``RoutedEngineClient``: to vLLM's server an engine, in truth a fleet.

A request takes six steps, and :meth:`RoutedEngineClient.generate` is where they stand
in order. The only file that implements vLLM's ``EngineClient``.
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, NoReturn

import msgspec
from vllm.engine.protocol import EngineClient, StreamingInput
from vllm.exceptions import VLLMError
from vllm.inputs import EngineInput, PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreRequest, PauseMode
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.kv_hints import KvHintsEnvelope

from common.errors import (
    MmRouterError,
    NotRoutedError,
    NoWorkerError,
    ProtocolError,
    RequestRejectedError,
    RetryBudgetError,
)
from common.identity import MmHash, RequestId
from common.lifecycle import Event, Lifecycle
from common.protocol import Ack, Failed, Nack, Output, Submit
from common.telemetry import MEDIA_ITEMS, REQUESTS, stage
from common.transfer.base import Loan
from frontend.call import Call
from frontend.deadlines import Deadlines
from frontend.failures import failure
from frontend.fault_settings import FaultSettings
from frontend.fleet import Fleet
from frontend.media import MediaLender
from frontend.preprocess import MediaItem, Preprocessor, ProcessedPrompt
from frontend.retry import Attempts, RetryBudget
from frontend.router.decision import Decision, MediaMove
from frontend.router.hashing import LoraKey, MediaSpan
from frontend.router.router import MediaNeed, Router, RoutingRequest
from frontend.vllm_errors import as_vllm_error
from frontend.worker_link import Answer, WorkerLink

HASH_INLINE_TOKENS = 4096
"""Longer prompts are hashed in a thread: at 32 k tokens it takes milliseconds."""


class RoutedEngineClient(EngineClient):
    """Implements what vLLM's server asks of an engine by asking a worker."""

    def __init__(
        self,
        preprocessor: Preprocessor,
        fleet: Fleet,
        router: Router,
        lender: MediaLender,
        faults: FaultSettings,
    ) -> None:
        self._faults = faults
        self._retry_budget = RetryBudget(faults.retry_budget)
        self._preprocessor = preprocessor
        self._fleet = fleet
        self._router = router
        self._lender = lender
        self.vllm_config = preprocessor.vllm_config
        self.model_config = preprocessor.model_config
        self.renderer = preprocessor.renderer
        self.input_processor = preprocessor.input_processor

    async def generate(
        self,
        prompt: EngineCoreRequest | PromptType | EngineInput | AsyncGenerator[StreamingInput, None],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: KvHintsEnvelope | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a rendered prompt on the worker that already holds most of it.

        Raises:
            VLLMValidationError: the request is wrong; 400.
            GracefulHTTPError: no worker could take it; 503.
            GenerationError: a worker failed on it; 500.
        """
        lifecycle = Lifecycle()
        outcome = "aborted"  # unless we get to say something else
        try:
            processed = await self._process(prompt, sampling_params, request_id, lora_request)
            call = Call(
                Submit(
                    request_id=RequestId(request_id),
                    prompt_token_ids=processed.token_ids,
                    sampling_params=sampling_params,
                    media=[item.part for item in processed.media],
                    shipments=[],
                    prompt_text=prompt_text or processed.prompt_text,
                    prompt_embeds=processed.prompt_embeds,
                    prompt_is_token_ids=processed.prompt_is_token_ids,
                    cache_salt=processed.cache_salt,
                    lora_request=lora_request,
                    priority=priority,
                    rank=data_parallel_rank,
                    session_id=session_id,
                    trace_headers=dict(trace_headers) if trace_headers else None,
                    reasoning_ended=reasoning_ended,
                    reasoning_parser_kwargs=reasoning_parser_kwargs,
                ),
                processed,
                lifecycle,
                Attempts(self._faults.migration_limit, self._retry_budget),
                Deadlines(self._faults),
                self.renderer.tokenizer,
            )
            while not lifecycle.ended:
                routing = await self._hash(call)
                decision = await self._select(call, routing)
                try:
                    link, loans = await self._lend(call, decision)
                    answers = self._dispatch(call, decision, link, loans)
                    async with aclosing(self._stream(call, decision, link, answers)) as outputs:
                        async for output in outputs:
                            yield output
                except MmRouterError as error:
                    self._router.failed(decision, error)
                    await call.failed(decision.worker_id, error)
            outcome = "ok"
        except (MmRouterError, VLLMError) as error:
            outcome = type(error).__name__
            lifecycle.on(Event.ERROR)
            if isinstance(error, MmRouterError):
                raise as_vllm_error(error) from error
            raise
        finally:
            if not lifecycle.ended:
                lifecycle.on(Event.CANCEL)
            REQUESTS.labels(outcome).inc()

    async def _process(
        self,
        prompt: EngineCoreRequest | PromptType | EngineInput | AsyncGenerator[StreamingInput, None],
        params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None,
    ) -> ProcessedPrompt:
        """Step 1. The renderer ran in vLLM's serving code; this validates and sorts."""
        if not isinstance(prompt, dict) or "type" not in prompt:
            raise RequestRejectedError("only prompts that vLLM's renderer made can be routed")
        with stage("process"):
            return await self._preprocessor.process(prompt, params, request_id, lora_request)

    async def _hash(self, call: Call) -> RoutingRequest:
        """Step 2. ``block_mm_infos`` and vLLM's own block hashes."""
        prompt, submit = call.prompt, call.seam.submit
        params = submit.sampling_params
        lora = prompt.lora_request
        request = RoutingRequest(
            request_id=submit.request_id,
            token_ids=submit.prompt_token_ids or [],
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
            reads_cache=params.prompt_logprobs is None and not params.skip_reading_prefix_cache,
        )
        with stage("hash"):
            if len(request.token_ids) > HASH_INLINE_TOKENS:
                hashes = await asyncio.to_thread(self._router.hash, request)
            else:
                hashes = self._router.hash(request)
        return dataclasses.replace(request, hashes=hashes)

    async def _select(self, call: Call, routing: RoutingRequest) -> Decision:
        """Step 3. The worker with the lowest cost, among those that did not fail on it.

        A request that lost its worker was accepted once: if there is no other it waits for
        one to come, or to come back, and for the retry budget.
        """
        now = asyncio.get_running_loop().time
        accepted = call.attempts.count > 0
        patience = now() + self._faults.worker_wait_s
        while True:
            arrival = self._fleet.arrival
            failed = {
                worker_id
                for worker_id, moment in call.attempts.tried.items()
                if not self._fleet.joined_since(worker_id, moment)
            }
            try:
                self._fleet.check_available()
                call.attempts.pay()
                with stage("select"):
                    return self._router.route(routing, exclude=failed, accepted=accepted)
            except RetryBudgetError as error:
                if self._fleet.closed or now() >= patience:
                    raise
                until = min(patience, now() + error.wait_s)
            except NoWorkerError as error:
                if self._fleet.closed or now() >= patience or not accepted:
                    raise call.attempts.take_failure() or error from error
                until = patience
            await call.wait(arrival, until)

    async def _lend(self, call: Call, decision: Decision) -> tuple[WorkerLink, list[Loan]]:
        """Step 4. The media that the worker lacks; an image shown twice goes once."""
        worker_id = decision.worker_id
        link = self._fleet.link(worker_id)
        lacking: list[MediaItem] = []
        for mm_hash, item in call.prompt.items().items():
            if self._router.holds_media(worker_id, mm_hash):
                decision.media.append(MediaMove(mm_hash, "held", 0, ""))
            else:
                lacking.append(item)
        with stage("lend"):
            loans = await self._lender.lend(worker_id, lacking)
        _record(decision, loans, "shipped")
        return link, loans

    def _dispatch(
        self, call: Call, decision: Decision, link: WorkerLink, loans: list[Loan]
    ) -> AsyncGenerator[Answer]:
        """Step 5. Takes over the loans. Each attempt has a name of its own, since an
        earlier one on the same worker may still be ending."""
        submit, attempt = call.seam.submit, call.attempts.count
        call.lifecycle.on(Event.DISPATCHED)
        return link.dispatch(
            msgspec.structs.replace(
                submit,
                request_id=RequestId(f"{submit.request_id}-{attempt}")
                if attempt
                else submit.request_id,
                rank=decision.rank if link.card.num_ranks > 1 else submit.rank,
                timeout_s=call.deadlines.left_s(),
            ),
            loans,
        )

    async def _stream(
        self, call: Call, decision: Decision, link: WorkerLink, answers: AsyncGenerator[Answer]
    ) -> AsyncGenerator[RequestOutput]:
        """Step 6. The worker's outputs as vLLM's; media it still lacks are supplied."""
        worker_id = decision.worker_id
        asked: Counter[MmHash] = Counter()
        cached_tokens: int | None = None
        try:
            async with aclosing(call.deadlines.watch(worker_id, answers)) as in_time:
                async for answer in in_time:
                    match answer:
                        case Ack():
                            call.lifecycle.on(Event.ACK)
                            self._router.media_acked(worker_id, answer.held)
                        case Nack():
                            call.lifecycle.on(Event.NACK)
                            await self._supply(call, decision, link, answer, asked)
                        case Failed():
                            raise failure(worker_id, answer)
                        case Output():
                            if cached_tokens is None:
                                cached_tokens = answer.num_cached_tokens or 0
                                self._router.first_token(decision.request_id)
                            output = call.answer(answer)
                            if output is not None:
                                yield output
                            if call.lifecycle.ended:
                                return
        finally:
            self._router.finished(decision.request_id, cached_tokens)

    async def _supply(
        self, call: Call, decision: Decision, link: WorkerLink, nack: Nack, asked: Counter[MmHash]
    ) -> None:
        """Give the worker what it lacks: as before, or inline if that was no use."""
        worker_id = decision.worker_id
        self._router.media_nacked(worker_id, nack.missing)
        items = call.prompt.items()
        unknown = [mm_hash for mm_hash in nack.missing if mm_hash not in items]
        if unknown:
            raise ProtocolError(f"worker {worker_id} asks for media that the prompt doesn't have")
        asked.update(nack.missing)
        again = any(asked[mm_hash] > 1 for mm_hash in nack.missing)
        loans = await self._lender.lend(
            worker_id, [items[mm_hash] for mm_hash in nack.missing], inline=again
        )
        _record(decision, loans, nack.reason)
        await link.supply(nack.request_id, loans)

    # What follows answers vLLM's server about the engine itself.

    @property
    def is_running(self) -> bool:
        """Always: workers come and go, the frontend stays."""
        return True

    @property
    def is_stopped(self) -> bool:
        """Never, see :attr:`is_running`."""
        return False

    @property
    def errored(self) -> bool:
        """Never: vLLM's server would shut down."""
        return False

    @property
    def dead_error(self) -> BaseException:
        """What vLLM's server would raise if we were errored."""
        return EngineDeadError()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a request before its response starts if nobody could take it."""
        try:
            self._fleet.check_available()
            self._router.check_room()
        except MmRouterError as error:
            REQUESTS.labels(type(error).__name__).inc()
            raise as_vllm_error(error) from error

    async def check_health(self) -> None:
        """Raises EngineDeadError, which vLLM's server reports as 503, without workers."""
        if not self._fleet.connected:
            raise EngineDeadError

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """What the workers can do."""
        return self._preprocessor.tasks

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Nothing to do: a request is aborted by closing its ``generate``."""

    async def is_tracing_enabled(self) -> bool:
        """Workers trace, if they are told to."""
        return True

    async def do_log_stats(self) -> None:
        """Workers log their statistics; ours are metrics."""

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """The frontend has no KV connector, so vLLM's server never calls this."""
        _not_routed("KV transfer between engines")

    def encode(
        self,
        prompt: PromptType | EngineInput,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pooling models are not routed."""
        _not_routed("pooling")

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Profile a worker instead."""
        _not_routed("profiling")

    async def stop_profile(self) -> None:
        """Profile a worker instead."""
        _not_routed("profiling")

    async def reset_mm_cache(self) -> None:
        """Forget processed media. Workers keep theirs: theirs is no shadow of ours."""
        self._preprocessor.clear_media()

    async def reset_encoder_cache(self) -> None:
        """Concerns single engines."""
        _not_routed("resetting encoder caches")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Concerns single engines."""
        _not_routed("resetting prefix caches")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Concerns single engines."""
        _not_routed("sleep")

    async def release_kv_cache_memory(self) -> None:
        """Concerns single engines."""
        _not_routed("releasing KV cache memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Concerns single engines."""
        _not_routed("waking up")

    async def is_sleeping(self) -> bool:
        """The frontend never sleeps."""
        return False

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Adapters are not routed yet."""
        _not_routed("LoRA adapters")

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        """Concerns single engines."""
        _not_routed("pausing")

    async def resume_generation(self) -> None:
        """Concerns single engines."""
        _not_routed("resuming")

    async def is_paused(self) -> bool:
        """The frontend never pauses."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing: preprocessor, fleet and arena have owners of their own."""


def _record(decision: Decision, loans: Iterable[Loan], how: str) -> None:
    for loan in loans:
        metadata = loan.metadata
        decision.media.append(MediaMove(metadata.mm_hash, how, metadata.nbytes, metadata.transport))
        MEDIA_ITEMS.labels(decision.worker_id, how).inc()


def _not_routed(what: str) -> NoReturn:
    raise as_vllm_error(NotRoutedError(f"{what} concerns a single engine: ask a worker for it"))

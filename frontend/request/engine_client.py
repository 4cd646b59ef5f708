"""``RoutedEngineClient``: an engine to vLLM's server, backed by a fleet.

The only file that implements vLLM's ``EngineClient``. The steps of a request are in
:mod:`frontend.request.runner`.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Final, NoReturn

from vllm.engine.protocol import EngineClient, StreamingInput
from vllm.inputs import EngineInput, PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.renderers.inputs.preprocess import parse_enc_dec_prompt
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreRequest, PauseMode
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.kv_hints import KvHintsEnvelope

from common.errors import (
    MmRouterError,
    NotRoutedError,
)
from common.observability.telemetry import REQUESTS
from frontend.asgi import as_vllm_error
from frontend.processes import Siblings
from frontend.processing import Preprocessor
from frontend.request.answer_limits import biases_of, prompt_weight
from frontend.request.call_gate import CallGate, batch_of_request
from frontend.request.runner import GenerateRequest, RequestRunner
from frontend.router import (
    Router,
)
from frontend.workers import Fleet

_FORGET_MEDIA: Final = "reset_mm_cache"


class RoutedEngineClient(EngineClient):
    """Implements vLLM's engine interface by asking workers."""

    def __init__(
        self,
        preprocessor: Preprocessor,
        fleet: Fleet,
        router: Router,
        runner: RequestRunner,
        most_calls: int,
        siblings: Siblings | None = None,
    ) -> None:
        """``most_calls`` run at once."""
        self._preprocessor = preprocessor
        self._fleet = fleet
        self._router = router
        self._runner = runner
        self._siblings = siblings
        self._gate = CallGate(router.load.slots, most_calls)
        if siblings is not None:
            siblings.tell(_FORGET_MEDIA, _forgetting_media(preprocessor))
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

        Args:
            request_id: the client's, who may choose one that exists: it names only outputs, log
                lines and decisions.
            session_id: dropped: an engine repeats its up to 64 KB in each KV event, and keeps
                10,000 steps of these.

        Raises:
            VLLMValidationError: the request is wrong; 400.
            GracefulHTTPError: no worker could take it; 503.
            GenerationError: a worker failed on it; 500.
        """
        if isinstance(prompt, dict) and "encoder_prompt" in prompt and "type" not in prompt:
            # vLLM leaves it unrendered where it asks a model for the language of a sound.
            (prompt,) = await self.renderer.render_cmpl_async([parse_enc_dec_prompt(prompt)])
        deadlines = self._runner.deadlines()
        request = GenerateRequest(
            prompt=prompt,
            sampling_params=sampling_params,
            client_id=request_id,
            prompt_text=prompt_text,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            rank=data_parallel_rank,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
            deadlines=deadlines,
        )
        choices, biases = sampling_params.n, biases_of(sampling_params)
        tokens = prompt_weight(prompt, choices)
        try:
            async with (
                self._gate.call(deadlines, tokens, choices, biases) as computed,
                aclosing(self._runner.run(request, computed)) as outputs,
            ):
                async for output in outputs:
                    yield output
        except MmRouterError as error:
            raise as_vllm_error(error) from error

    # Questions of vLLM's server about the engine itself.

    @property
    def is_running(self) -> bool:
        """Always: workers come and go, the frontend stays."""
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        """Never: vLLM's server would shut down."""
        return False

    @property
    def dead_error(self) -> BaseException:
        return EngineDeadError()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Reject a request before its response starts if no worker could take it."""
        try:
            self._fleet.check_available()
            self._router.check_room()
        except MmRouterError as error:
            REQUESTS.labels(type(error).__name__).inc()
            raise as_vllm_error(error) from error

    async def check_health(self) -> None:
        """Raise GracefulHTTPError without workers: the same 503 as before the first one."""
        try:
            self._fleet.check_available()
        except MmRouterError as error:
            raise as_vllm_error(error) from error

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return self._preprocessor.tasks

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Do nothing: closing ``generate`` aborts. Clients choose ids, so they could hit
        others'.
        """

    async def is_tracing_enabled(self) -> bool:
        """Always: workers trace if they are told to."""
        return True

    async def do_log_stats(self) -> None:
        """Do nothing: workers log their statistics; ours are metrics."""

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """The frontend has no KV connector, so vLLM's server never calls this."""
        _not_routed("KV transfer between engines")

    async def encode(
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
        """Pool a rendered prompt on a worker; choice and errors are those of :meth:`generate`."""
        deadlines = self._runner.deadlines()
        request = GenerateRequest(
            prompt=prompt,
            sampling_params=None,
            client_id=request_id,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            pooling_params=pooling_params,
            deadlines=deadlines,
        )
        try:
            async with (
                self._gate.call(deadlines, prompt_weight(prompt)),
                aclosing(self._runner.run(request)) as outputs,
            ):
                async for output in outputs:
                    batch_of_request().keep(output.outputs.data.nbytes)
                    yield output
        except MmRouterError as error:
            raise as_vllm_error(error) from error

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        _not_routed("profiling")

    async def stop_profile(self) -> None:
        _not_routed("profiling")

    async def reset_mm_cache(self) -> None:
        """Forget processed media. Workers have caches of their own, see ``/reset_mm_cache``."""
        self._preprocessor.clear_media()
        if self._siblings is not None:
            await self._siblings.ask(_FORGET_MEDIA)

    async def reset_encoder_cache(self) -> None:
        _not_routed("resetting encoder caches")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        _not_routed("resetting prefix caches")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        _not_routed("sleep")

    async def release_kv_cache_memory(self) -> None:
        _not_routed("releasing KV cache memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        _not_routed("waking up")

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        _not_routed("loading LoRA adapters")

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        _not_routed("pausing")

    async def resume_generation(self) -> None:
        _not_routed("resuming")

    async def is_paused(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: preprocessor, fleet and arena have owners of their own."""


def _forgetting_media(preprocessor: Preprocessor) -> Callable[[bytes], bytes]:
    def forget(_: bytes) -> bytes:
        preprocessor.clear_media()
        return b""

    return forget


def _not_routed(what: str) -> NoReturn:
    raise as_vllm_error(NotRoutedError(f"{what} concerns a single engine"))

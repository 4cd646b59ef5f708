"""The worker: answers the executor as a GPU worker does, but computes nothing."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models import supports_transcription
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from tests.simgpu import host_memory
from tests.simgpu.answers import MediaContents, SimRequest, Vocabulary
from tests.simgpu.gpu import DeviceClock, GpuModel
from tests.simgpu.logprobs import logprobs_of
from tests.simgpu.stats import Stats, StatsFile


@dataclass(slots=True)
class _Step:
    """What is computed in a step."""

    req_ids: list[str] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    context_tokens: int = 0
    encoder_items: int = 0
    encoder_tokens: int = 0


@dataclass(frozen=True)
class Pooled:
    """What a model that pools answers.

    Attributes:
        width: numbers for each prompt.
    """

    task: SupportedTask
    width: int

    def of(self, sampled: list[int]) -> torch.Tensor | None:
        """Numbers between 0 and 1; None until the prompt is computed, which samples a token."""
        if not sampled:
            return None
        return torch.frac(torch.arange(1, self.width + 1) * 0.618 * (sampled[0] + 1))


def _pooled_of(config: VllmConfig) -> Pooled | None:
    model = config.model_config
    if model.runner_type != "pooling":
        return None
    if model.convert_type == "classify":
        return Pooled("classify", getattr(model.hf_config, "num_labels", 1))
    return Pooled("embed", model.get_hidden_size())


class SimOutput(AsyncModelRunnerOutput):
    """The result of a step, there once the modelled GPU is through with it."""

    def __init__(self, output: ModelRunnerOutput, end: float, stats: Stats) -> None:
        self._output = output
        self._end = end
        self._stats = stats

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step's end."""
        self._stats.late_seconds += DeviceClock.wait_until(self._end)
        return self._output

    def get_kv_connector_output(self) -> None:
        """There is no connector; vLLM asks since 0.33."""


class SimWorker(WorkerBase):
    """A worker without model, weights and KV memory."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        for name in ("speculative_config", "kv_transfer_config"):
            if getattr(vllm_config, name, None) is not None:
                raise ValueError(f"simgpu does not support {name}")
        self._pooled = _pooled_of(vllm_config)
        self._gpu = GpuModel.from_env()
        self._clock = DeviceClock()
        self._stats = Stats()
        self._stats_file = StatsFile(self._stats)
        self._vocabulary = Vocabulary.of(vllm_config)
        self._requests: dict[str, SimRequest] = {}
        self._media = MediaContents()
        self._loras = set[int]()
        self._pending: SimOutput | None = None

    # Start-up

    def init_device(self) -> None:
        """There is no device."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """There are no weights."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Full attention in every layer."""
        model, cache = self.model_config, self.cache_config
        spec = FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=model.get_num_kv_heads(self.parallel_config),
            head_size=model.get_head_size(),
            dtype=model.dtype,
        )
        layers = model.get_num_layers(self.parallel_config)
        return {f"model.layers.{i}.self_attn.attn": spec for i in range(layers)}

    def determine_available_memory(self) -> int:
        """As much as SIMGPU_KV_TOKENS take."""
        specs = self.get_kv_cache_spec()
        blocks = -(-int(self._gpu.kv_tokens) // self.cache_config.block_size)
        return blocks * sum(spec.page_size_bytes for spec in specs.values())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Nothing is allocated: blocks exist in the scheduler only."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to warm up; start-up ends here."""
        self._stats_file.start()
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """Generation, speech to text included, or what the model is to pool for."""
        if self._pooled is not None:
            return (self._pooled.task,)
        speech = supports_transcription(get_model_cls(self.model_config))
        return ("generate", "transcription") if speech else ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take over the length that vLLM fitted to the KV cache."""
        self.model_config.max_model_len = max_model_len

    # Steps

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Put the step on the device's clock; its tokens are fetched by ``sample_tokens``."""
        for req_id in scheduler_output.finished_req_ids:
            self._requests.pop(req_id, None)
        copied = host_memory.copied(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return ModelRunnerOutput.with_ec_conn_output_only(copied)

        step = self._step(scheduler_output)
        loaded, loaded_tokens = host_memory.loaded(scheduler_output)
        seconds = self._gpu.step_seconds(
            step.prefill_tokens, step.encoder_tokens, step.context_tokens, loaded_tokens
        )
        end, idle = self._clock.submit(seconds)
        if scheduler_output.scheduled_cached_reqs.req_ids:
            self._stats.stall_seconds += idle
        self._stats.steps += 1
        self._stats.prefill_tokens += step.prefill_tokens
        self._stats.decode_tokens += step.decode_tokens
        self._stats.encoder_items += step.encoder_items
        self._stats.encoder_tokens += step.encoder_tokens
        self._stats.loaded_items += loaded
        self._stats.busy_seconds += seconds
        self._stats_file.changed()
        index = {req_id: i for i, req_id in enumerate(step.req_ids)}
        output = ModelRunnerOutput(step.req_ids, index, sampled_token_ids=step.sampled)
        output.ec_connector_output = copied
        asked = [self._requests[req_id].sampling for req_id in step.req_ids]
        output.logprobs = logprobs_of(asked, step.sampled, self.model_config.get_vocab_size())
        if self._pooled is not None:
            output.pooler_output = [self._pooled.of(tokens) for tokens in step.sampled]
            output.sampled_token_ids = []
            self._stats.late_seconds += DeviceClock.wait_until(end)
            return output
        self._pending = SimOutput(output, end, self._stats)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> SimOutput:
        """The tokens of the step that ``execute_model`` began; grammars are ignored."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending

    def execute_dummy_batch(self) -> None:
        """Nothing to keep in step with."""

    def take_draft_token_ids(self) -> None:
        """There is no speculation."""

    def _step(self, scheduler_output: SchedulerOutput) -> "_Step":
        """What a step computes, and the tokens that it gives."""
        step = _Step()
        for req_id, computed, outputs in self._rows(scheduler_output):
            request = self._requests[req_id]
            count = scheduler_output.num_scheduled_tokens[req_id]
            known = request.prompt_tokens + outputs
            if computed < known - 1 or not outputs:
                step.prefill_tokens += count
            else:
                step.decode_tokens += count
            step.context_tokens += computed
            step.req_ids.append(req_id)
            complete = computed + count >= known
            picked = [self._vocabulary.pick(request.seed, outputs)] if complete else []
            step.sampled.append(picked)
        for req_id, items in scheduler_output.scheduled_encoder_inputs.items():
            step.encoder_items += len(items)
            step.encoder_tokens += sum(self._requests[req_id].encoder_tokens[i] for i in items)
        return step

    def _rows(self, scheduled: SchedulerOutput) -> Iterable[tuple[str, int, int]]:
        """Yield each scheduled request's id, computed tokens and output tokens so far."""
        for new in scheduled.scheduled_new_reqs:
            if new.req_id not in self._requests:
                self._stats.requests += 1
                self._stats.cached_tokens += new.num_computed_tokens
            request = self._requests[new.req_id] = SimRequest.of(new, self._media)
            known = new.prefill_token_ids  # with outputs, if the request was preempted
            outputs = len(known) - request.prompt_tokens if known else 0
            yield new.req_id, new.num_computed_tokens, outputs
        cached = scheduled.scheduled_cached_reqs
        yield from zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        )

    # The rest of what an engine may ask for

    def reset_encoder_cache(self) -> None:
        """Nothing is kept."""

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Adapters change identities (as in vLLM), not times."""
        self._loras.add(lora_request.lora_int_id)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter."""
        self._loras.discard(lora_id)
        return True

    def pin_lora(self, lora_id: int) -> bool:
        """All adapters stay."""
        return lora_id in self._loras

    def list_loras(self) -> set[int]:
        """The adapters added."""
        return set(self._loras)

    def sleep(self, level: int = 1) -> None:
        """Nothing to free."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing to load."""

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **_: Any) -> None:
        """Nothing to profile."""

    def shutdown(self) -> None:
        """Write the totals a last time."""
        self._stats_file.write()

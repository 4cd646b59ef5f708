"""The one file of the worker that touches vLLM's engine. Starts an AsyncLLM, reports its resolved
settings for the card, feeds it prompts with processed media, and reads its load. Knows no sockets.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from vllm import AsyncEngineArgs, envs
from vllm.envs import enable_envs_cache
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
)
from vllm.inputs import EngineInput, embeds_input, tokens_input
from vllm.multimodal.cache import BaseMultiModalProcessorCache, MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from backend_worker.engine import outputs as engine_outputs
from backend_worker.engine.adapters import Adapters
from backend_worker.engine.calls import (
    AnyOutput,
    ask,
    check,
    check_form,
    encoded,
    has_failed,
    media_input,
)
from backend_worker.engine.config import USAGE, engine_config, served_ranks
from backend_worker.engine.encodings import kept_tokens
from backend_worker.engine.operations import operate, refuses
from backend_worker.engine.outputs import DirectLLM
from backend_worker.engine.render import LocalRenderer, partitioned_hashes
from backend_worker.engine.statistics import StatsBoard
from backend_worker.engine.token_texts import remember_texts
from common.aio.processes import freeze_heap
from common.errors import (
    ConfigurationError,
    EngineFailedError,
    EngineGoneError,
    MediaMissingError,
    RequestRejectedError,
    WorkerBusyError,
)
from common.identity import MmHash, WorkerId
from common.observability import telemetry
from common.request_plane.card import (
    CacheSettings,
    Capacity,
    EngineSettings,
    KvEventSource,
    ModelSettings,
    OutputSettings,
    PrefixReuse,
)
from common.request_plane.operations import LoadLoraAdapter, Operation, UnloadLoraAdapter
from common.request_plane.protocol import MediaPart, Submit
from common.request_plane.step_sums import StepSums
from common.vllm_compat import text_streams
from common.vllm_compat.engine_settings import (
    engine_settings,
    model_settings,
    output_settings,
    prefix_reuse,
)
from common.vllm_compat.features import forget_evicted_media
from common.vllm_compat.renderer_patches import HfProcessorRuns, patch_renderer

SHUTDOWN_S = 10.0  # how long engine processes may take to clean up after themselves
ALIVE_CHECK_S = 0.5  # polling interval for an engine's death during a call

_Answer = TypeVar("_Answer")

Items = Mapping[MmHash, MultiModalKwargsItem]


@dataclass(frozen=True)
class RankLoad:
    """Load of one rank's engine, in the units of ``common.request_plane.protocol.RankStatus``."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


async def answered(llm: AsyncLLM, call: Awaitable[_Answer]) -> _Answer:
    """Await an answer; raise EngineGoneError if the engine dies. vLLM would wait for ever."""
    asking = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({asking}, timeout=ALIVE_CHECK_S))[0]:
            if llm.errored:
                raise EngineGoneError("the worker's engine died")
        return await asking
    except EngineDeadError as error:
        raise EngineGoneError("the worker's engine died") from error
    finally:
        asking.cancel()


class Engine:
    """An AsyncLLM that takes prompts with processed media."""

    def __init__(
        self,
        args: AsyncEngineArgs,
        llm: AsyncLLM,
        stats: StatsBoard,
        worker_id: WorkerId,
        adapters: Adapters,
    ) -> None:
        self.adapters = adapters
        self._stats = stats
        self._args = args
        self._llm = llm
        self._ranks = served_ranks(llm.vllm_config.parallel_config)
        self._hf_runs = HfProcessorRuns(side="worker", worker_id=worker_id)
        patch_renderer(llm.renderer, runs=self._hf_runs, hashes=partitioned_hashes)
        self._cache = llm.renderer.mm_processor_cache
        # A cache that keeps the tensors themselves (more than one rank behind one AsyncLLM) must
        # not keep views of memory that the frontend will reuse.
        self._copies_items = isinstance(self._cache, MultiModalProcessorOnlyCache)

    @classmethod
    async def start(
        cls,
        args: AsyncEngineArgs,
        worker_id: WorkerId,
        adapters: Adapters,
        encoder_cache_tokens: int = 0,
    ) -> "Engine":
        """Start the engine processes and wait until they can serve.

        Raises:
            ConfigurationError: see :func:`engine_config`; or an adapter can't be loaded.
            EngineGoneError: the engine died right after its start.
            Exception: vLLM's error if the model can't be loaded; the process should end.
        """
        adapters.check(enabled=args.enable_lora, taken=_served_names(args))
        show_steps = args.enable_logging_iteration_details
        args.enable_logging_iteration_details = True  # else the engine reports no steps
        config = engine_config(args, encoder_cache_tokens)
        stats = StatsBoard(show_steps=show_steps)
        engine_outputs.install()
        text_streams.install()
        llm = DirectLLM.from_vllm_config(
            config,
            usage_context=USAGE,
            stat_loggers=[stats],
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
            aggregate_engine_logging=args.aggregate_engine_logging,
        )
        if (tokenizer := llm.renderer.tokenizer) is not None:
            remember_texts(tokenizer)
        try:
            # Joins the warm-up and drops its dummy items.
            await answered(llm, llm.reset_mm_cache())
            if config.lora_config is not None:
                adapters.slots = config.lora_config.max_loras
            await adapters.load(lambda adapter: answered(llm, llm.add_lora(adapter)))
        except (EngineGoneError, ConfigurationError):
            llm.shutdown()
            raise
        # vLLM does this in its engine's process, but not in this one. Without it, environment
        # variables are read at each token, and the garbage collector scans all loaded objects.
        enable_envs_cache()
        freeze_heap()
        return cls(args, llm, stats, worker_id, adapters)

    @property
    def errored(self) -> bool:
        """Whether the engine died; no request can succeed any more."""
        return self._llm.errored

    @property
    def hf_processor_runs(self) -> int:
        """HF processor calls in this worker; 0 if every item was transferred."""
        return self._hf_runs.total

    def local_renderer(self) -> LocalRenderer:
        return LocalRenderer(self._llm.renderer)

    async def supported_tasks(self) -> list[str]:
        """Return vLLM's task names, for example ``generate``. Raises EngineGoneError."""
        return list(await answered(self._llm, self._llm.get_supported_tasks()))

    def served_model_names(self) -> list[str]:
        return _served_names(self._args)

    def model_settings(self) -> ModelSettings:
        return model_settings(self._llm.model_config)

    def output_settings(self) -> OutputSettings:
        return output_settings(self._llm.vllm_config)

    def engine_settings(self) -> EngineSettings:
        return engine_settings(self._args)

    def cache_settings(self) -> CacheSettings:
        """Return the settings with which a frontend computes the same block hashes."""
        config = self._llm.vllm_config.cache_config
        hash_function = get_hash_fn_by_name(config.prefix_caching_hash_algo)
        return CacheSettings(
            block_size=config.block_size
            * self._llm.vllm_config.parallel_config.decode_context_parallel_size,
            hash_algorithm=config.prefix_caching_hash_algo,
            none_hash=hash_function(resolve_none_hash_seed(hash_function)).hex(),
            enable_prefix_caching=bool(config.enable_prefix_caching),
        )

    def prefix_reuse(self) -> PrefixReuse:
        return prefix_reuse(self._llm.vllm_config)

    def capacity(self) -> Capacity:
        config = self._llm.vllm_config
        return Capacity(
            use_v2_model_runner=config.use_v2_model_runner,
            # vLLM adds up the blocks of the ranks behind an AsyncLLM.
            num_blocks=(config.cache_config.num_gpu_blocks or 0) // len(self.ranks),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            encoder_cache_tokens=kept_tokens(config),
        )

    @property
    def ranks(self) -> list[int]:
        """Data-parallel ranks behind this AsyncLLM, numbered over the whole group."""
        return self._ranks

    def kv_event_sources(self) -> list[KvEventSource]:
        """Return the bound KV event endpoints of the ranks; empty if they publish none."""
        return [
            KvEventSource(
                rank=rank,
                endpoint=source.endpoint,
                replay_endpoint=source.replay_endpoint,
                topic=source.topic,
                buffer_steps=source.buffer_steps,
            )
            for rank, source in sorted(self._llm.get_kv_event_sources().items())
        ]

    def holds(self, mm_hash: MmHash) -> bool:
        """Return whether a prompt may name this item without bringing its tensors."""
        return self._cache is not None and self._cache.is_cached_item(mm_hash)

    def load(self) -> dict[int, RankLoad]:
        """Return the load by rank, without ranks that keep no statistics."""
        return {
            rank: RankLoad(
                running=stats.num_running_reqs,
                waiting=stats.num_waiting_reqs,
                kv_usage=min(max(stats.kv_cache_usage, 0.0), 1.0),
            )
            for rank, stats in self._stats.latest().items()
        }

    async def log_statistics(self) -> None:
        """Have vLLM log its statistics at its interval, until cancelled. It logs none while idle,
        or with ``--disable-log-stats``."""
        while True:
            await asyncio.sleep(envs.VLLM_LOG_STATS_INTERVAL)
            await self._llm.do_log_stats()

    def steps(self) -> list[StepSums]:
        return self._stats.steps()

    async def generate(self, submit: Submit, items: Items) -> AsyncGenerator[AnyOutput]:
        """Run a generating or pooling request. Closing the iterator aborts it in the engine.

        Raises:
            MediaMissingError: a part is neither in ``items`` nor held, or the engine had evicted
                it. No output was produced.
            RequestRejectedError: the request is invalid for the engine, or its answer too large.
            WorkerBusyError: admission control is full, an operator ended the request, or the engine
                is paused.
            EngineFailedError: the engine failed on it.
            EngineGoneError: the engine is dead.
        """
        # From here to the first output nothing may suspend before AsyncLLM has sent the request:
        # its media cache mirrors the engine's only if both see requests in the same order.
        forget_evicted_media(self._llm.renderer)
        prompt = self._engine_input(submit, items)
        cached = [part.mm_hash for part in submit.media if self.holds(part.mm_hash)]
        adapter, rank = self.adapters.named(submit.lora_request), self._local_rank(submit.rank)
        outputs = ask(self._llm, submit, prompt, adapter, rank)
        produced = False
        try:
            async for output in outputs:
                if not produced:
                    self._check_evicted(output, cached)
                    produced = True
                if self._llm.vllm_config.kv_transfer_config is None:
                    check_form(output, submit)
                check(output)
                yield output
        except VLLMClientError as error:
            raise RequestRejectedError(str(error)) from error
        except GracefulHTTPError as error:
            raise WorkerBusyError(error.message) from error
        except RetryableRequestError as error:
            raise WorkerBusyError(str(error)) from error
        except GenerationError as error:
            raise EngineFailedError(f"the engine failed: {error}") from error
        except EngineDeadError as error:
            raise EngineGoneError("the worker's engine died") from error
        except EngineGenerateError as error:
            raise EngineFailedError(f"the engine failed: {error.__cause__ or error}") from error
        finally:
            await outputs.aclose()

    async def settled(self) -> None:
        """Wait until the engine has received every earlier message, by a round trip on its channel.
        An aborted request's tensors may still be in a socket; their memory must not change."""
        # A dead engine reads nothing any more. Ranks that disagree have still answered.
        with contextlib.suppress(EngineGoneError, RuntimeError):
            await answered(self._llm, self._llm.is_sleeping())

    def refuses(self, operation: Operation) -> str:
        """Return why the worker never does an operation; empty if it does."""
        if isinstance(operation, LoadLoraAdapter | UnloadLoraAdapter):
            return self._refuses_adapters()
        return refuses(self._llm, operation)

    def _refuses_adapters(self) -> str:
        if not self._args.enable_lora:
            return "the worker runs without --enable-lora"
        if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            return "the worker runs without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        return ""

    async def operate(self, operation: Operation) -> None:
        """Run an operator's operation, without a time limit. Raises EngineGoneError,
        OperationRefusedError (nothing was done), and vLLM's errors."""
        match operation:
            case LoadLoraAdapter():
                adding = self.adapters.add(operation, self._llm.add_lora, self.served_model_names())
                await answered(self._llm, adding)
            case UnloadLoraAdapter():
                self.adapters.forget(operation)
            case _:
                await answered(self._llm, operate(self._llm, operation))

    async def rests(self) -> bool:
        """Return whether the engine is paused or asleep. Raises EngineGoneError."""
        return await answered(self._llm, self._llm.is_sleeping())

    def shutdown(self) -> None:
        """Stop the engine processes. Blocks until they are gone."""
        self._llm.shutdown(timeout=SHUTDOWN_S)

    def _check_evicted(self, first: AnyOutput, cached: list[MmHash]) -> None:
        """Raise MediaMissingError if a request failed because the engine had evicted its media."""
        if has_failed(first):
            # AsyncLLM drops items that its engine evicted from its own cache only later.
            forget_evicted_media(self._llm.renderer)
            missing = [mm_hash for mm_hash in cached if not self.holds(mm_hash)]
            if missing:
                raise MediaMissingError(missing, "engine_evicted")

    def _local_rank(self, rank: int | None) -> int | None:
        """Convert a rank of the group to its index behind this AsyncLLM, as vLLM takes it."""
        return None if rank is None else self._ranks.index(rank)

    def _engine_input(self, submit: Submit, items: Items) -> EngineInput:
        if submit.prompt_embeds is not None:
            return embeds_input(
                submit.prompt_embeds,
                prompt_token_ids=submit.prompt_token_ids,
                is_token_ids=submit.prompt_is_token_ids,
                cache_salt=submit.cache_salt,
            )
        token_ids = submit.prompt_token_ids or []
        if not submit.media:
            return tokens_input(token_ids, cache_salt=submit.cache_salt)
        # By position: the engine's side of the cache sees them in this order.
        sent = self._inject(submit.media, items)
        prompt = media_input(token_ids, submit.media, sent, submit.cache_salt)
        return encoded(prompt) if self._llm.model_config.is_encoder_decoder else prompt

    @telemetry.stage("inject")
    def _inject(self, parts: list[MediaPart], items: Items) -> list[MultiModalKwargsItem | None]:
        """Return for each part its tensors, an address, or None, as the engine takes it."""
        missing = [p.mm_hash for p in parts if p.mm_hash not in items and not self.holds(p.mm_hash)]
        if missing:
            raise MediaMissingError(missing, "not_held")
        if self._cache is None:
            return [items[part.mm_hash] for part in parts]
        # As vLLM does in both of its processes. Otherwise a part evicts the next one of its own
        # prompt, and so on, once the cache is full and the first one was evicted.
        for part in parts:
            self._cache.touch_sender_cache_item(part.mm_hash)
        try:
            return self._put(self._cache, parts, items)
        finally:
            self._cache.release_sender_touches()

    def _put(
        self, cache: BaseMultiModalProcessorCache, parts: list[MediaPart], items: Items
    ) -> list[MultiModalKwargsItem | None]:
        sent: list[MultiModalKwargsItem | None] = []
        for part in parts:
            item = items.get(part.mm_hash)
            if item is not None:
                slot = [copy.deepcopy(item) if self._copies_items else item]
                self._llm.input_processor.inject_into_mm_cache(
                    {part.modality: [part.mm_hash]}, {part.modality: slot}
                )
                sent.append(slot[0])
            elif self.holds(part.mm_hash):
                sent.append(cache.get_and_update_item(None, part.mm_hash)[0])
            else:
                # The prompt is larger than the cache, and an earlier part evicted this one. The
                # engine won't see the injected items: forget them here as well.
                for earlier in parts[: len(sent)]:
                    cache.invalidate(earlier.mm_hash)
                raise MediaMissingError([part.mm_hash], "evicted")
        return sent


def _served_names(args: AsyncEngineArgs) -> list[str]:
    names = args.served_model_name or args.model
    return [names] if isinstance(names, str) else list(names)

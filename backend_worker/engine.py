"""The one file of the worker that touches vLLM's engine.

Starts an AsyncLLM, says what it resolved to (for the card), gives it prompts whose
media are already processed, and reads how busy it is. Knows no sockets.
"""

import asyncio
import contextlib
import copy
import os
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vllm import AsyncEngineArgs
from vllm.config import KVEventsConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import EngineInput, embeds_input, tokens_input
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.outputs import RequestOutput
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from backend_worker.engine_operations import operate
from backend_worker.engine_statistics import StatsBoard
from backend_worker.media_input import media_input
from backend_worker.ranks import check_launch, served_ranks
from backend_worker.render import LocalRenderer, partitioned_hashes
from common import telemetry, tracing
from common.card import (
    CacheSettings,
    Capacity,
    EngineSettings,
    KvEventSource,
    ModelSettings,
    OutputSettings,
)
from common.engine_arguments import check_arguments, check_configuration
from common.engine_settings import engine_settings, model_settings, output_settings
from common.errors import (
    EngineFailedError,
    EngineGoneError,
    MediaMissingError,
    RequestRejectedError,
    WorkerBusyError,
)
from common.hf_processor_runs import HfProcessorRuns
from common.identity import MmHash, WorkerId
from common.operations import Operation
from common.protocol import MediaPart, Submit
from common.renderer_patches import patch_renderer
from common.step_sums import EngineSums

SHUTDOWN_S = 10.0
"""How long engine processes may take to clean up after themselves."""

ALIVE_CHECK_S = 0.5
"""How often it is looked whether an engine that was asked something has died."""

_Answer = TypeVar("_Answer")

Items = Mapping[MmHash, MultiModalKwargsItem]


@dataclass(frozen=True)
class RankLoad:
    """How busy the engine of one rank is; the units are those of
    ``common.protocol.RankStatus``."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


def prepare_environment(host: str) -> None:
    """Set what vLLM reads from the environment, unless the user did. Before anything
    else: engine processes inherit it.

    Args:
        host: address on which KV events are served.
    """
    os.environ.setdefault("VLLM_HOST_IP", host)
    # Whole block hashes in events: 64 bits of them could be another image's.
    os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def with_our_defaults(args: AsyncEngineArgs, given: frozenset[str]) -> AsyncEngineArgs:
    """The engine arguments with what routing needs, unless the user said otherwise.

    Args:
        args: as vLLM's own parser made them; changed in place and returned.
        given: names of the arguments that the user gave.
    """
    for name in ("model", "tokenizer", "hf_config_path", "generation_config"):
        # The frontend reads them too, from another working directory perhaps, and the
        # model's name enters every media hash.
        value = getattr(args, name)
        if value not in (None, "auto", "vllm") and Path(value).is_dir():
            setattr(args, name, str(Path(value).absolute()))
    if "prefix_caching_hash_algo" not in given:
        args.prefix_caching_hash_algo = "sha256_cbor"
    # vLLM starts and stops this process's profiler in any threads: PyTorch's second one kills it.
    args.profiler_config.ignore_frontend = True
    if "kv_events_config" not in given:
        args.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint="tcp://*:0",
            replay_endpoint="tcp://*:0",
        )
    return args


async def answered(llm: AsyncLLM, call: Awaitable[_Answer]) -> _Answer:
    """An engine's answer. vLLM would wait for ever for that of an engine that died.

    Raises:
        EngineGoneError: it died.
    """
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
        self, args: AsyncEngineArgs, llm: AsyncLLM, stats: StatsBoard, worker_id: WorkerId
    ) -> None:
        self._stats = stats
        self._args = args
        self._llm = llm
        self._ranks = served_ranks(llm.vllm_config.parallel_config)
        self._hf_runs = HfProcessorRuns(side="worker", worker_id=worker_id)
        patch_renderer(llm.renderer, runs=self._hf_runs, hashes=partitioned_hashes)
        self._cache = llm.renderer.mm_processor_cache
        # A cache that keeps the tensors themselves (more than one rank behind one
        # AsyncLLM) must not keep views of memory that the frontend will reuse.
        self._copies_items = isinstance(self._cache, MultiModalProcessorOnlyCache)

    @classmethod
    async def start(cls, args: AsyncEngineArgs, worker_id: WorkerId) -> "Engine":
        """Start the engine processes and wait until they can serve.

        Raises:
            ConfigurationError: an argument that frontends can't follow, or a launch under
                which the ranks can't be served.
            EngineGoneError: the engine died right after it had started.
            Whatever vLLM raises when a model can't be loaded: the caller ends.
        """
        check_arguments(args)
        show_steps = args.enable_logging_iteration_details
        args.enable_logging_iteration_details = True  # else the engine says nothing of its steps
        config = args.create_engine_config()
        check_configuration(config)
        check_launch(config)
        stats = StatsBoard(show_steps=show_steps)
        llm = AsyncLLM.from_vllm_config(
            config,
            stat_loggers=[stats],
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
        )
        try:
            # Joins the warm-up, drops its dummy items.
            await answered(llm, llm.reset_mm_cache())
        except EngineGoneError:
            llm.shutdown()
            raise
        return cls(args, llm, stats, worker_id)

    @property
    def errored(self) -> bool:
        """True once the engine died; no request can succeed any more."""
        return self._llm.errored

    @property
    def hf_processor_runs(self) -> int:
        """Calls of the HF processor in this worker; 0 if every item was transferred."""
        return self._hf_runs.total

    def local_renderer(self) -> LocalRenderer:
        """Processes media here, for when they are not transferred."""
        return LocalRenderer(self._llm.renderer)

    async def supported_tasks(self) -> list[str]:
        """vLLM's task names, for example ``generate``.

        Raises:
            EngineGoneError: the engine died.
        """
        return list(await answered(self._llm, self._llm.get_supported_tasks()))

    def served_model_names(self) -> list[str]:
        """Names under which users ask for the model."""
        names = self._args.served_model_name or self._args.model
        return [names] if isinstance(names, str) else list(names)

    def model_settings(self) -> ModelSettings:
        """What a frontend needs to make the same tokens and media hashes."""
        return model_settings(self._llm.model_config)

    def output_settings(self) -> OutputSettings:
        """What a frontend needs to treat answers alike."""
        return output_settings(self._llm.vllm_config)

    def engine_settings(self) -> EngineSettings:
        """What must be the same on all workers."""
        return engine_settings(self._args)

    def cache_settings(self) -> CacheSettings:
        """What a frontend needs to make the same block hashes."""
        config = self._llm.vllm_config.cache_config
        hash_function = get_hash_fn_by_name(config.prefix_caching_hash_algo)
        return CacheSettings(
            block_size=config.block_size
            * self._llm.vllm_config.parallel_config.decode_context_parallel_size,
            hash_algorithm=config.prefix_caching_hash_algo,
            none_hash=hash_function(resolve_none_hash_seed(hash_function)).hex(),
            enable_prefix_caching=bool(config.enable_prefix_caching),
        )

    def capacity(self) -> Capacity:
        """Size of one rank."""
        config = self._llm.vllm_config
        return Capacity(
            # vLLM adds up those of the ranks behind an AsyncLLM.
            num_blocks=(config.cache_config.num_gpu_blocks or 0) // len(self.ranks),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        )

    @property
    def ranks(self) -> list[int]:
        """The data-parallel ranks behind this AsyncLLM, by their numbers in the whole group."""
        return self._ranks

    def kv_event_sources(self) -> list[KvEventSource]:
        """Where the ranks publish KV events, as bound. Empty if they don't."""
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
        """Whether a prompt may name this item without bringing its tensors."""
        return self._cache is not None and self._cache.is_cached_item(mm_hash)

    def load(self) -> dict[int, RankLoad]:
        """How busy each rank is. Ranks are missing that keep no statistics."""
        return {
            rank: RankLoad(
                running=stats.num_running_reqs,
                waiting=stats.num_waiting_reqs,
                kv_usage=min(max(stats.kv_cache_usage, 0.0), 1.0),
            )
            for rank, stats in self._stats.latest().items()
        }

    def steps(self) -> list[EngineSums]:
        """What the steps of each rank add up to, since the start; zeros without statistics."""
        return self._stats.steps()

    async def generate(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        """Run a request. Closing the iterator aborts it in the engine.

        Args:
            submit: the request; every media part is in ``items`` or held.
            items: tensors of the parts that came along.

        Raises:
            MediaMissingError: a part is neither in ``items`` nor held, or the
                engine turned out to have evicted it. No output was produced.
            RequestRejectedError: the engine finds the request invalid.
            WorkerBusyError: the engine's admission control is full.
            EngineFailedError: the engine failed on it.
            EngineGoneError: the engine is dead.
        """
        # From here to the first output nothing may suspend before AsyncLLM has
        # sent the request: its media cache mirrors the engine's only if both see
        # requests in the same order.
        prompt = self._engine_input(submit, items)
        cached = [part.mm_hash for part in submit.media if self.holds(part.mm_hash)]
        outputs = self._llm.generate(
            prompt,
            submit.sampling_params,
            submit.request_id,
            prompt_text=submit.prompt_text,
            lora_request=submit.lora_request,
            trace_headers=tracing.headers_onwards(submit.trace_headers),
            priority=submit.priority,
            data_parallel_rank=self._local_rank(submit.rank),
            session_id=submit.session_id,
            reasoning_ended=submit.reasoning_ended,
            reasoning_parser_kwargs=submit.reasoning_parser_kwargs,
        )
        produced = False
        try:
            async for output in outputs:
                failed = any(one.finish_reason == "error" for one in output.outputs)
                # AsyncLLM drops what its engine misses from its own cache.
                missing = [mm_hash for mm_hash in cached if failed and not self.holds(mm_hash)]
                if missing and not produced:
                    raise MediaMissingError(missing, "engine_evicted")
                produced = True
                yield output
        except VLLMClientError as error:
            raise RequestRejectedError(str(error)) from error
        except GracefulHTTPError as error:
            raise WorkerBusyError(error.message) from error
        except EngineDeadError as error:
            raise EngineGoneError("the worker's engine died") from error
        except EngineGenerateError as error:
            raise EngineFailedError(f"the engine failed: {error.__cause__ or error}") from error
        finally:
            await outputs.aclose()

    async def settled(self) -> None:
        """Wait until the engine has taken everything that was sent to it before.

        An aborted request's tensors may still be in a socket, and their memory
        must not change under it. A round trip on the same ordered channel proves
        that they arrived.
        """
        # Nobody is left to read them; or its ranks differ in the answer, but it came.
        with contextlib.suppress(EngineGoneError, RuntimeError):
            await answered(self._llm, self._llm.is_sleeping())

    async def operate(self, operation: Operation) -> None:
        """Do what an operator wants, however long it takes.

        Raises:
            OperationRefusedError: this engine does not, and nothing was done.
            EngineGoneError: the engine is dead.
            Exception: vLLM's, of what failed.
        """
        await answered(self._llm, operate(self._llm, operation))

    async def rests(self) -> bool:
        """Whether it is paused or asleep.

        Raises:
            EngineGoneError: the engine is dead.
        """
        return await answered(self._llm, self._llm.is_sleeping())

    def shutdown(self) -> None:
        """Stop the engine processes. Blocks until they are gone."""
        self._llm.shutdown(timeout=SHUTDOWN_S)

    def _local_rank(self, rank: int | None) -> int | None:
        """The number of a rank among those behind this AsyncLLM, which vLLM asks for."""
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
        # By position, the order in which the engine's side of the cache sees them.
        sent = self._inject(submit.media, items)
        return media_input(token_ids, submit.media, sent, submit.cache_salt)

    @telemetry.stage("inject")
    def _inject(self, parts: list[MediaPart], items: Items) -> list[MultiModalKwargsItem | None]:
        """What goes to the engine for each part: tensors, an address, or None."""
        missing = [p.mm_hash for p in parts if p.mm_hash not in items and not self.holds(p.mm_hash)]
        if missing:
            raise MediaMissingError(missing, "not_held")
        sent: list[MultiModalKwargsItem | None] = []
        for part in parts:
            item = items.get(part.mm_hash)
            if item is not None:
                slot = [copy.deepcopy(item) if self._copies_items else item]
                self._llm.input_processor.inject_into_mm_cache(
                    {part.modality: [part.mm_hash]}, {part.modality: slot}
                )
                sent.append(slot[0])
            elif self._cache is not None and self.holds(part.mm_hash):
                sent.append(self._cache.get_and_update_item(None, part.mm_hash)[0])
            else:
                # Injecting an earlier part of this very prompt evicted it. The
                # engine won't see what was injected: forget it here as well.
                for earlier in parts[: len(sent)]:
                    if self._cache is not None:
                        self._cache.invalidate(earlier.mm_hash)
                raise MediaMissingError([part.mm_hash], "evicted")
        return sent

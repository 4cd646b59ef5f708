"""A worker with everything but an engine: it says letters, and which one depends on its place
alone, so that an answer that went on elsewhere must read as if it had not.

    python -m tests.fakes.lettered_worker FLAGS...

Flags, card, discovery, sockets and KV events are a worker's; nothing is loaded or computed.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockStored, EventPublisherFactory, KVEventBatch
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from backend_worker import worker
from backend_worker.engine.adapters import Adapters
from backend_worker.engine.config import engine_config
from backend_worker.engine.vllm_engine import Items, RankLoad
from common.identity import WorkerId
from common.request_plane.card import (
    CacheSettings,
    Capacity,
    EngineSettings,
    KvEventSource,
    ModelSettings,
    OutputSettings,
    PrefixReuse,
)
from common.request_plane.operations import Operation, Pause, Resume, Sleep, WakeUp
from common.request_plane.protocol import Submit
from common.request_plane.step_sums import StepSums
from common.transfer.base import MediaSource
from common.vllm_compat import engine_settings
from tests.fakes.engine import no_rendering
from tests.fakes.letters import letter, letter_tokens

STEP_S: Final = 0.01
BLOCKS: Final = 2048


class _NoRenderer:
    """Media come processed."""

    @staticmethod
    async def render(source: MediaSource) -> Any:
        return await no_rendering(source)


class LetterEngine:
    """What a worker needs of an engine."""

    errored = False
    hf_processor_runs = 0
    ranks = (0,)
    adapters = Adapters()

    def __init__(self, args: AsyncEngineArgs, config: VllmConfig) -> None:
        self._args = args
        self._config = config
        self._block_size = config.cache_config.block_size
        self._hash = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(self._hash)
        self._stored: set[bytes] = set()
        self._publisher = EventPublisherFactory.create(config.kv_events_config)
        self._letters = letter_tokens(args.model)
        self._running = 0
        self._rests = False

    @classmethod
    async def start(
        cls,
        args: AsyncEngineArgs,
        worker_id: WorkerId,
        adapters: Adapters,
        encoder_cache_tokens: int = 0,
    ) -> "LetterEngine":
        made = cls(args, engine_config(args))
        made.adapters = adapters
        return made

    def shutdown(self) -> None:
        self._publisher.shutdown()

    async def log_statistics(self) -> None:
        pass

    def local_renderer(self) -> type[_NoRenderer]:
        return _NoRenderer

    # What stands on the card

    async def supported_tasks(self) -> list[str]:
        return ["generate"]

    def served_model_names(self) -> list[str]:
        name = self._args.served_model_name
        assert isinstance(name, list)
        return name

    def model_settings(self) -> ModelSettings:
        return engine_settings.model_settings(self._config.model_config)

    def output_settings(self) -> OutputSettings:
        return engine_settings.output_settings(self._config)

    def engine_settings(self) -> EngineSettings:
        return engine_settings.engine_settings(self._args)

    def cache_settings(self) -> CacheSettings:
        return CacheSettings(
            block_size=self._block_size,
            hash_algorithm=self._config.cache_config.prefix_caching_hash_algo,
            none_hash=bytes(kv_cache_utils.NONE_HASH).hex(),
            enable_prefix_caching=True,
        )

    def prefix_reuse(self) -> PrefixReuse:
        return engine_settings.prefix_reuse(self._config)

    def capacity(self) -> Capacity:
        return Capacity(
            num_blocks=BLOCKS,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            encoder_cache_tokens=8192,
        )

    def kv_event_sources(self) -> list[KvEventSource]:
        source = self._publisher.get_publisher_config()
        assert source is not None and source.endpoint is not None
        return [
            KvEventSource(
                rank=0,
                endpoint=source.endpoint,
                replay_endpoint=source.replay_endpoint,
                topic=source.topic,
                buffer_steps=source.buffer_steps,
            )
        ]

    # What it does

    def holds(self, mm_hash: str) -> bool:
        return False

    def load(self) -> dict[int, RankLoad]:
        return {0: RankLoad(running=self._running, waiting=0, kv_usage=0.0)}

    def steps(self) -> list[StepSums]:
        return []

    async def settled(self) -> None:
        pass

    # What operators want of it

    def refuses(self, operation: Operation) -> str:
        asleep = isinstance(operation, Sleep) and operation.level
        return "the worker runs without --enable-sleep-mode" if asleep else ""

    async def operate(self, operation: Operation) -> None:
        match operation:
            case Pause() | Sleep():
                self._rests = True
            case Resume() | WakeUp():
                self._rests = False

    async def rests(self) -> bool:
        return self._rests

    async def generate(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        tokens = list(submit.prompt_token_ids or [])
        cached = self._store(tokens)
        assert submit.sampling_params is not None
        wanted = submit.sampling_params.max_tokens or 1
        self._running += 1
        try:
            for count in range(1, wanted + 1):
                await asyncio.sleep(STEP_S)
                said = letter(len(tokens))
                tokens.append(self._letters[said])
                self._store(tokens)
                reason = "length" if count == wanted else None
                completion = CompletionOutput(
                    0, said, tokens[-1:], None, None, finish_reason=reason
                )
                yield RequestOutput(
                    "r", None, None, None, [completion], reason is not None,
                    num_cached_tokens=cached,
                )  # fmt: skip
        finally:
            self._running -= 1

    def _store(self, tokens: list[int]) -> int:
        """Publish the full blocks that are new; how many tokens were in others."""
        parent = kv_cache_utils.NONE_HASH
        known = 0
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            block = tokens[start : start + self._block_size]
            before = parent
            parent = kv_cache_utils.hash_block_tokens(self._hash, before, tuple(block))
            if parent in self._stored:
                known += self._block_size
                continue
            self._stored.add(parent)
            stored = BlockStored(
                block_hashes=[parent],
                parent_block_hash=before if start else None,
                token_ids=block,
                block_size=self._block_size,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=[None],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
            self._publisher.publish(KVEventBatch(ts=time.time(), events=[stored]))
        return known


if __name__ == "__main__":
    vars(worker)["Engine"] = LetterEngine
    sys.argv[0] = "lettered_worker"
    worker.run()

"""What a router predicts is what vLLM's own KV cache manager finds cached: for models with groups
of every kind, with drafting and without, while predictions live."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from common.identity import RequestId
from frontend.router.event_wire import decode_batch
from frontend.router.inputs import EventSource, RoutingRequest
from frontend.router.router import Router
from tests.by_version import since_033
from tests.fakes.feeds import ScriptedFeeds
from tests.fakes.routing import BLOCK, worker

MAX_TOKENS = 4096
CHUNK = 5 * BLOCK
BLOCKS = 4000


def full(heads: int = 1) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=64, dtype=torch.float32
    )


def window(tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=tokens
    )


def state(kept: str) -> KVCacheSpec:
    return MambaSpec(
        block_size=BLOCK, shapes=((64,),), dtypes=(torch.float32,), mamba_cache_mode=kept
    )


class Engine:
    """vLLM's cache of an engine, which computes each request in chunks and says a few words.

    Args:
        groups: the groups of its KV cache.
        drops: whether it drafts in a way for which the last block of a hit is dropped.
        drafting_group: the one group with drafting layers, if vLLM knows it.
    """

    def __init__(
        self, groups: Sequence[KVCacheSpec], drops: bool, drafting_group: int | None
    ) -> None:
        init_none_hash(sha256_cbor)
        config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{number}"], spec, number == drafting_group)
                for number, spec in enumerate(groups)
            ],
            prefix_cache_retention_interval=0 if any(map(sparse, groups)) else None,
        )
        self._cache = KVCacheManager(
            config,
            max_model_len=MAX_TOKENS,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_in_flight_tokens=CHUNK,
            use_eagle=drops,
            enable_kv_cache_events=True,
        )
        self._drops = drops
        self._aligned = any(getattr(spec, "mamba_cache_mode", "") == "align" for spec in groups)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self._count = 0

    def serve(self, prompt: Sequence[int], says: int) -> int:
        """Run a request; how many prompt tokens were cached."""
        self._count += 1
        request = Request(
            request_id=str(self._count),
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=says),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._cache.new_step_starts()
        blocks, cached, request.shared_prefix_boundary = self._cache.get_computed_blocks(request)
        self._step(request, self._chunk(request, cached), cached, blocks)
        while (done := request.num_computed_tokens) < len(prompt):
            self._step(request, self._chunk(request, done))
        for _ in range(says):
            request.append_output_token_ids(7)
            self._step(request, 1)
        self._cache.free(request)
        return cached

    def _chunk(self, request: Request, start: int) -> int:
        """How many tokens a step computes of a prompt.

        Where states are kept at the ends of chunks only, vLLM's scheduler ends one where a later
        prompt may go on: behind the last block that is found, and behind what is shared already.
        """
        end = min(start + CHUNK, request.num_tokens)
        if self._aligned:
            found = (
                request.num_tokens // BLOCK - 1
                if self._drops
                else (request.num_tokens - 1) // BLOCK
            )
            last = found * BLOCK
            shared = request.shared_prefix_boundary // BLOCK * BLOCK
            end = min((stop for stop in (last, shared) if start < stop < end), default=end)
        return end - start

    def _step(self, request: Request, tokens: int, cached: int = 0, blocks: object = None) -> None:
        self._cache.new_step_starts()
        allocated = self._cache.allocate_slots(request, tokens, cached, blocks)
        assert allocated is not None
        request.num_computed_tokens += cached + tokens

    def events(self) -> bytes:
        """As they are on the wire."""
        groups = self._cache.kv_cache_event_metadata
        events = self._cache.block_pool.take_events()
        for event in events:
            if hasattr(event, "kv_cache_spec_kind") and event.group_idx is not None:
                kind, tokens = groups[event.group_idx]
                event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = kind, tokens
        return msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))


def sparse(spec: KVCacheSpec) -> bool:
    return isinstance(spec, SlidingWindowSpec | MambaSpec)


MODELS: dict[str, Callable[[], list[KVCacheSpec]]] = {
    "full": lambda: [full()],
    "full twice": lambda: [full(), full(2)],
    "window": lambda: [window(3 * BLOCK)],
    "a narrow window": lambda: [window(BLOCK)],
    "full and window": lambda: [full(), window(3 * BLOCK)],
    "full and windows": lambda: [full(), window(3 * BLOCK), window(2 * BLOCK), window(3 * BLOCK)],
    "windows": lambda: [window(3 * BLOCK), window(5 * BLOCK + 1)],
    "full and state, at ends of chunks": lambda: [full(), state("align"), state("align")],
}
MODELS |= since_033({}, {"full and state": lambda: [full(), state("all"), state("all")]})


def prompts(seed: int) -> Iterator[list[int]]:
    """Some that are new, repeated, and that begin as others; often of whole blocks."""
    dice = random.Random(seed)
    known: list[list[int]] = []
    for number in range(60):
        kind = dice.random()
        length = dice.choice([BLOCK * dice.randint(1, 12), dice.randint(1, 12 * BLOCK)])
        if not known or kind < 0.3:
            prompt = [1000 * number + position for position in range(length)]
        else:
            before = dice.choice(known)
            cut = len(before) if kind < 0.8 else dice.randint(1, len(before))
            prompt = before[:cut] + ([] if kind < 0.5 else [number] * dice.randint(1, 3 * BLOCK))
        known.append(prompt)
        yield prompt


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In events, as workers have them."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


@pytest.mark.parametrize("late", [0, 1], ids=["", "events come late"])
@pytest.mark.parametrize("drafting", ["", "EAGLE", "MTP"])
@pytest.mark.parametrize("model", MODELS)
async def test_a_hit_is_as_long_as_predicted(model: str, drafting: str, late: int) -> None:
    """With events that come late all that is known of the last request is what was predicted."""
    mtp = drafting == "MTP"
    engine = Engine(MODELS[model](), bool(drafting), 0 if mtp else None)
    feeds = ScriptedFeeds()
    router = Router(clock=lambda: 0.0, feeds=feeds, seed=1)
    none_hash = bytes(kv_cache_utils.NONE_HASH)
    served = worker(
        "a",
        none_hash=none_hash,
        drops_last_block=bool(drafting),
        drops_in_windows=not mtp,
        event_sources=(EventSource(0, "unused", "unused"),),
    )
    await router.roster.add(served)
    try:
        engine.serve([5] * BLOCK * 2, 1)  # tells of the groups
        feeds.by_worker["a"].apply(*decode_batch(engine.events()).changes)
        events: deque[bytes] = deque()
        for number, prompt in enumerate(prompts(seed=late)):
            while len(events) > late:
                feeds.by_worker["a"].apply(*decode_batch(events.popleft()).changes)
            request = RoutingRequest(RequestId(str(number)), prompt)
            predicted = router.route(request).predicted_cached_tokens
            realised = engine.serve(prompt, says=1 + number % 40)
            router.in_flight.finished(request.request_id, served=True)
            # Where groups differ vLLM keeps what two prompts share too, and events tell it.
            pinned = late and "and" in model and predicted < realised
            assert predicted == realised or pinned, (number, len(prompt))
            events.append(engine.events())
    finally:
        await router.close()

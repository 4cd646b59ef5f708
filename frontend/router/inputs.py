"""Inputs of the router: requests and workers. No decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.identity import BlockHash, Incarnation, MmHash, RequestId, Target, WorkerId
from frontend.router.hashing import (
    BlockMmInfos,
    HashScheme,
    LoraKey,
    MediaSpan,
    PromptEmbeds,
    block_mm_infos,
)


class MediaNeed(NamedTuple):
    """One media item of a request, with the number of encoder tokens and bytes of its tensors."""

    mm_hash: MmHash
    span: MediaSpan
    num_tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request as the router sees it.

    Attributes:
        request_id: unique id of the engine call.
        token_ids: the prompt; zeros where embeddings stand for tokens.
        media: by offset, as vLLM keeps them.
        reads_cache: whether the engine may use its prefix cache; False with prompt
            log-probabilities, for instance.
        hashes: result of an earlier :meth:`Router.hash`, computed in another thread.
        client_id: id chosen by the client, for people who inspect decisions.
        choices: answers to generate, each a request of its own in the engine.
    """

    request_id: RequestId
    token_ids: Sequence[int]
    media: Sequence[MediaNeed] = ()
    lora: LoraKey | None = None
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None
    reads_cache: bool = True
    hashes: Mapping[HashScheme, list[BlockHash]] | None = None
    client_id: str = ""
    choices: int = 1

    def block_mm_infos(self, block_size: int) -> list[BlockMmInfos]:
        spans = [need.span for need in self.media]
        return block_mm_infos(len(self.token_ids), block_size, spans)


@dataclass(frozen=True, slots=True)
class EventSource:
    """ZMQ endpoints at which one data-parallel rank publishes its KV events."""

    rank: int
    endpoint: str
    replay_endpoint: str
    topic: str = ""


@dataclass(frozen=True, slots=True)
class RoutableWorker:
    """A worker as the router sees it, built from its card. Capacities are per rank, 0 if unknown.

    Attributes:
        incarnation: adding another incarnation of a known worker forgets everything of the one
            before.
        ranks: data-parallel ranks that take requests.
        hash_algorithm: vLLM's ``prefix_caching_hash_algo``.
        none_hash: parent of first blocks.
        encoder_tokens: capacity of the encoder cache.
        drops_last_block: whether its engine recomputes the last block of a hit, as with EAGLE and
            MTP drafting.
        drops_in_windows: whether it does so in windowed groups too, where there are other groups.
        keeps_tails: whether windowed and recurrent groups keep only the blocks that a repeated
            prompt needs; otherwise all computed ones.
        active_adapters: adapters that its engine has loaded.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    ranks: tuple[int, ...]
    block_size: int
    hash_algorithm: str
    none_hash: bytes
    event_sources: tuple[EventSource, ...] = ()
    kv_tokens: int = 0
    max_num_seqs: int = 0
    encoder_tokens: int = 0
    prefix_caching: bool = True
    drops_last_block: bool = False
    drops_in_windows: bool = True
    keeps_tails: bool = True
    adapters: frozenset[LoraKey] = frozenset()
    active_adapters: frozenset[str] = frozenset()

    @property
    def scheme(self) -> HashScheme:
        return HashScheme(self.block_size, self.hash_algorithm, self.none_hash)

    def resumes_at(self, prompt_tokens: int) -> Sequence[int]:
        """Return the blocks at which a later prompt may resume after one of ``prompt_tokens``
        tokens.

        Windowed and recurrent groups keep the blocks needed for that, and drop the rest. Source:
        ``replay_boundaries`` of vLLM 0.32.0 and 0.33.0.
        """
        whole = prompt_tokens // self.block_size
        if not self.keeps_tails:
            return range(1, whole + 1)
        last = max(0, prompt_tokens - 1) // self.block_size
        if self.drops_last_block:
            return sorted({max(0, last - 1), max(0, whole - 1)})
        return (last,)

    def window_peek(self, *, alone: bool) -> int:
        """Return how many blocks beyond its end a hit needs in windowed groups, the only ones if
        ``alone``.
        """
        return int(self.drops_last_block and (alone or self.drops_in_windows))

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(Target(self.worker_id, rank) for rank in self.ranks)

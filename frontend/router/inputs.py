"""What the router must know of requests and of workers. Nothing here decides."""

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
    """One media item of a request: its place in the prompt, tokens that the encoder yields for
    it, and the size of its processed tensors.
    """

    mm_hash: MmHash
    span: MediaSpan
    num_tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request as the router sees it.

    Attributes:
        request_id: of the engine call; no other has it.
        token_ids: the prompt; zeros where embeddings stand for tokens.
        media: its items, by offset, as vLLM keeps them.
        embeds: the embeddings that stand for some of its tokens, or for all.
        reads_cache: whether the engine may serve its prompt from the prefix cache;
            not so with prompt log-probabilities, for instance.
        hashes: what :meth:`Router.hash` returned for it, if that was called before,
            in another thread.
        client_id: what the client calls it, for people who look at decisions.
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

    def block_mm_infos(self, block_size: int) -> list[BlockMmInfos]:
        spans = [need.span for need in self.media]
        return block_mm_infos(len(self.token_ids), block_size, spans)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one data-parallel rank publishes its KV events: ZMQ endpoints to connect to."""

    rank: int
    endpoint: str
    replay_endpoint: str
    topic: str = ""


@dataclass(frozen=True, slots=True)
class RoutableWorker:
    """A worker as the router sees it; built from its card.

    Attributes:
        incarnation: its run. Adding a worker under a known name with another
            incarnation forgets everything of the one before.
        ranks: data-parallel ranks that take requests.
        hash_algorithm: vLLM's ``prefix_caching_hash_algo``.
        none_hash: parent of first blocks.
        kv_tokens: tokens that fit into one rank's KV cache, 0 if unknown.
        max_num_seqs: requests that one rank runs at once, 0 if unknown.
        encoder_tokens: media tokens whose encodings one rank keeps, 0 if unknown.
        drops_last_block: whether its engine recomputes the last block of a hit, as it
            does with EAGLE and MTP drafting.
        drops_in_windows: whether it does so in groups of layers with a window too, where there
            are groups of others.
        keeps_tails: whether groups of layers with a window or a state keep only what a repeated
            prompt needs; otherwise all that they computed.
        active_adapters: names of those that its engine need not load first.
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
        """Return at which blocks a later prompt may go on from one of so many tokens.

        Groups of layers with a window or a state keep what is needed for that, and drop the rest.
        Source: ``replay_boundaries`` of vLLM 0.32.0 and 0.33.0.
        """
        whole = prompt_tokens // self.block_size
        if not self.keeps_tails:
            return range(1, whole + 1)
        last = max(0, prompt_tokens - 1) // self.block_size
        if self.drops_last_block:
            return sorted({max(0, last - 1), max(0, whole - 1)})
        return (last,)

    def window_peek(self, *, alone: bool) -> int:
        """Return how many blocks beyond its end a hit needs in groups of layers with a window,
        which are ``alone`` where there are no others.
        """
        return int(self.drops_last_block and (alone or self.drops_in_windows))

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(Target(self.worker_id, rank) for rank in self.ranks)

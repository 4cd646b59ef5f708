"""What the router must know of a worker. Building it from a card is the fleet's task."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.identity import Incarnation, Target, WorkerId
from frontend.router.hashing import HashScheme, LoraKey


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one rank publishes its KV events.

    Attributes:
        rank: data-parallel rank.
        endpoint: ZMQ endpoint of its PUB socket, to connect to.
        replay_endpoint: that of its ROUTER socket; ``None`` if it has none.
        topic: topic of its messages.
        buffer_steps: events it keeps for replay.
    """

    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 0


@dataclass(frozen=True, slots=True)
class RoutableWorker:
    """What the router must know of a worker; built from its card.

    Attributes:
        worker_id: its name.
        incarnation: its run. Adding a worker under a known name with another
            incarnation forgets everything of the one before.
        ranks: data-parallel ranks that take requests.
        block_size: tokens per hashed block.
        hash_algorithm: vLLM's ``prefix_caching_hash_algo``.
        none_hash: parent of first blocks.
        event_sources: where its ranks publish KV events; empty if they don't.
        kv_tokens: tokens that fit into one rank's KV cache, 0 if unknown.
        max_num_seqs: requests that one rank runs at once, 0 if unknown.
        encoder_tokens: media tokens whose encodings one rank keeps, 0 if unknown.
        prefix_caching: whether it reuses blocks at all.
        drops_last_block: whether its engine recomputes the last block of a hit, as it
            does with EAGLE and MTP drafting.
        drops_in_windows: whether it does so in groups of layers with a window too, where there
            are groups of others.
        adapters: that requests may ask it for.
        active_adapters: names of those that its engine need not load first.
        keeps_tails: whether groups of layers with a window or a state keep only what a repeated
            prompt needs; otherwise all that they computed.
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
        """How its blocks are hashed."""
        return HashScheme(self.block_size, self.hash_algorithm, self.none_hash)

    def resumes_at(self, prompt_tokens: int) -> Sequence[int]:
        """At which blocks a later prompt may go on from one of so many tokens.

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
        """How many blocks beyond its end a hit needs in groups of layers with a window.

        Args:
            alone: whether there are no other groups.
        """
        return int(self.drops_last_block and (alone or self.drops_in_windows))

    @property
    def targets(self) -> tuple[Target, ...]:
        """Its ranks as targets."""
        return tuple(Target(self.worker_id, rank) for rank in self.ranks)

"""What the router must know of a worker. Building it from a card is the fleet's task."""

from dataclasses import dataclass

from common.identity import Incarnation, Target, WorkerId
from frontend.router.hashing import HashScheme


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

    @property
    def scheme(self) -> HashScheme:
        """How its blocks are hashed."""
        return HashScheme(self.block_size, self.hash_algorithm, self.none_hash)

    @property
    def targets(self) -> tuple[Target, ...]:
        """Its ranks as targets."""
        return tuple(Target(self.worker_id, rank) for rank in self.ranks)

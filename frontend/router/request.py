"""What the router must know of a request. Nothing here decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.identity import BlockHash, MmHash, RequestId
from frontend.router.hashing import (
    BlockMmInfos,
    HashScheme,
    LoraKey,
    MediaSpan,
    PromptEmbeds,
    block_mm_infos,
)


class MediaNeed(NamedTuple):
    """One media item of a request.

    Attributes:
        mm_hash: its content.
        span: its name in block hashes and its place in the prompt.
        num_tokens: tokens that the encoder yields for it.
        nbytes: size of its processed tensors.
    """

    mm_hash: MmHash
    span: MediaSpan
    num_tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What the router must know of a request.

    Attributes:
        request_id: of the engine call; no other has it.
        token_ids: the prompt; zeros where embeddings stand for tokens.
        media: its items, by offset, as vLLM keeps them.
        lora: its adapter.
        cache_salt: its salt.
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
        """The media items that each full block of its prompt touches.

        Args:
            block_size: tokens per block.
        """
        spans = [need.span for need in self.media]
        return block_mm_infos(len(self.token_ids), block_size, spans)

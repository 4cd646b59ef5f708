"""``block_mm_infos``: which media items each block of a prompt touches, and where.

It is what vLLM mixes into block hashes as extra keys. Pure arithmetic on
positions; no tokens, no hashes.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from common.identity import MmIdentifier

MmInfo: TypeAlias = tuple[str, int]
"""``(identifier, offset)``: the item's first placeholder token relative to the
block's first token. Negative in a block that continues an item."""

BlockMmInfos: TypeAlias = tuple[MmInfo, ...]
"""The items one block touches, in prompt order."""

_NO_MEDIA: BlockMmInfos = ()


class MediaSpan(NamedTuple):
    """Where the placeholders of one media item stand in a prompt.

    Attributes:
        identifier: name under which the item enters block hashes.
        offset: index of the first placeholder token in the prompt.
        length: number of tokens of the placeholder range, tokens that an
            ``is_embed`` mask leaves to text included: vLLM hashes the range.
    """

    identifier: MmIdentifier
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Index after the last token of the range."""
        return self.offset + self.length


def block_mm_infos(
    num_tokens: int, block_size: int, spans: Sequence[MediaSpan]
) -> list[BlockMmInfos]:
    """The media items that each full block of a prompt touches.

    Args:
        num_tokens: length of the prompt.
        block_size: tokens per block.
        spans: the media items in the order vLLM keeps them, by offset. They may
            overlap, as sound and picture of one video do; vLLM then names, for a
            block inside the first of them, only that first one, and so does this.

    Returns:
        One entry per full block, ``num_tokens // block_size`` in all.
    """
    blocks = num_tokens // block_size
    infos: list[BlockMmInfos] = [_NO_MEDIA] * blocks
    if not spans:
        return infos
    # vLLM looks at no block that starts after the end of the last item listed,
    # even if an earlier item reaches further.
    first_past_media = min(blocks, -(-spans[-1].end // block_size))
    current = 0
    block = 0
    while current < len(spans):
        # Blocks before the current item touch nothing: jump to the one it starts in.
        block = max(block, spans[current].offset // block_size)
        if block >= first_past_media:
            break
        start = block * block_size
        # Blocks that end inside the current item touch it alone.
        identifier, offset, length = spans[current]
        inside = min(blocks, first_past_media, (offset + length - 1) // block_size)
        if inside > block:
            relative = range(offset - start, offset - inside * block_size, -block_size)
            infos[block:inside] = [((identifier, position),) for position in relative]
            block = inside
            continue
        end = start + block_size
        touched: list[MmInfo] = []
        while current < len(spans):
            span = spans[current]
            if span.offset >= end:
                break
            if span.end > start:
                touched.append((span.identifier, span.offset - start))
                if span.end > end:
                    break
            current += 1
        infos[block] = tuple(touched) if touched else _NO_MEDIA
        block += 1
    return infos


class PromptEmbeds(NamedTuple):
    """The embeddings of a whole prompt.

    Attributes:
        data: a row for each token, one after the other; of tokens that are none, what the engine
            is sent for them.
        rows: how many there are.
    """

    data: memoryview
    rows: int

    def digests(self, block_size: int) -> list[bytes]:
        """Of each full block the SHA-256 of its rows.

        Args:
            block_size: tokens per block.
        """
        size = block_size * len(self.data) // max(self.rows, 1)
        starts = range(0, self.rows // block_size * size, size or 1)
        return [hashlib.sha256(self.data[start : start + size]).digest() for start in starts]

"""Embeddings that stand in a prompt instead of tokens, as vLLM mixes them into block hashes."""

import hashlib
from typing import NamedTuple


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

"""Compute vLLM's hashes of a prompt's blocks."""

from frontend.router.hashing.block_hasher import (
    BlockHasher,
    BlockMmInfos,
    HashScheme,
    LoraKey,
    MediaSpan,
    PromptEmbeds,
    block_mm_infos,
)
from frontend.router.hashing.hash_memo import HashMemo

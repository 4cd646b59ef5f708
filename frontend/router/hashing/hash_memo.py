"""LRU cache of recent prompts' hashes, so that shared beginnings are not hashed again.

A conversation repeats its whole past with every turn, and many prompts begin with the same
instructions.
"""

import threading
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, TypeAlias

import numpy as np

from common.identity import BlockHash
from common.lru import Lru
from frontend.router.hashing.block_hasher import BlockHasher, BlockMmInfos

_FEWEST_BLOCKS = 4
"""Shorter beginnings are hashed faster than found."""

MAX_TOKENS: Final = 1_000_000
"""Tokens of recent prompts, about ten bytes each: more prompts than a frontend has in flight."""

Tokens: TypeAlias = "array[int]"
"""Token ids, 32 bits each."""

_Context: TypeAlias = tuple[tuple[str, str] | None, str | None]
"""LoRA adapter and salt: the other inputs of the first block."""

_Key: TypeAlias = tuple[_Context, int, int]
"""Context, number of blocks and checksum of a beginning."""


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt hashed before, with the tokens of its full blocks and the keys of its beginnings.

    It is useless when no key leads to it any more (``leading``).
    """

    tokens: Tokens
    mm_infos: Sequence[BlockMmInfos]
    hashes: list[BlockHash]
    keys: "list[_Key]"
    leading: int = 0


class HashMemo:
    """Memoizing hasher. Thread-safe.

    A prompt is found by the checksums of its beginnings of 4, 8, 16 … blocks, so at least half of
    the part shared with the last prompt of such a beginning is found; comparing tokens finds the
    rest. Reused blocks were compared token by token.
    """

    def __init__(self, hasher: BlockHasher, max_tokens: int = MAX_TOKENS) -> None:
        self.scheme = hasher.scheme
        self._hasher = hasher
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._by_key: dict[_Key, _Prompt] = {}
        self._prompts: Lru[_Prompt, _Prompt] = Lru(max_tokens, lambda one: len(one.tokens))

    def hash(
        self,
        token_ids: Sequence[int],
        mm_infos: Sequence[BlockMmInfos],
        *,
        lora: tuple[str, str] | None = None,
        cache_salt: str | None = None,
        embeds_digests: Sequence[bytes] | None = None,
    ) -> list[BlockHash]:
        """Hash as :meth:`BlockHasher.hash` does. The caller must not change the list."""
        if embeds_digests is not None:
            # Embeddings share their token ids, and their digests are computed by now.
            return self._hasher.hash(
                token_ids, mm_infos, lora=lora, cache_salt=cache_salt, embeds_digests=embeds_digests
            )
        size = self.scheme.block_size
        blocks = len(token_ids) // size
        tokens = None
        if blocks >= _FEWEST_BLOCKS and self._max_tokens:
            tokens = _as_array(token_ids, blocks * size)
        if tokens is None:
            return self._hasher.hash(token_ids, mm_infos, lora=lora, cache_salt=cache_salt)
        keys = _keys((lora, cache_salt), tokens, size)
        known, shared = self._find(keys, tokens, mm_infos)
        hashes = [] if known is None else known.hashes[:shared]
        if shared < blocks:
            hashes += self._hasher.hash(
                tokens[shared * size :],
                mm_infos[shared:],
                lora=lora,
                cache_salt=cache_salt,
                parent=hashes[-1] if hashes else None,
            )
        with self._lock:
            self._remember(_Prompt(tokens, mm_infos, hashes, keys))
        return hashes

    def _find(
        self, keys: list[_Key], tokens: Tokens, mm_infos: Sequence[BlockMmInfos]
    ) -> tuple[_Prompt | None, int]:
        """Return a remembered prompt and how many leading blocks it shares with this one."""
        with self._lock:
            found = [prompt for key in reversed(keys) if (prompt := self._by_key.get(key))]
        for prompt in found:
            shared = _shared(prompt.tokens, tokens) // self.scheme.block_size
            if prompt.mm_infos or mm_infos:
                shared = _alike(prompt.mm_infos, mm_infos, shared)
            if shared:
                return prompt, shared
        return None, 0

    def _remember(self, prompt: _Prompt) -> None:
        if len(prompt.tokens) > self._max_tokens:
            return
        for key in prompt.keys:
            before = self._by_key.get(key)
            if before is not None:
                before.leading -= 1
                if not before.leading:
                    # Every beginning that led to it leads to a later prompt now.
                    self._prompts.pop(before)
            self._by_key[key] = prompt
        prompt.leading = len(prompt.keys)
        for oldest in self._prompts.put(prompt, prompt):
            for key in oldest.keys:
                if self._by_key.get(key) is oldest:
                    del self._by_key[key]


def _as_array(token_ids: Sequence[int], count: int) -> "Tokens | None":
    """Return the first ``count`` token ids as 32-bit numbers; ``None`` if one doesn't fit."""
    try:
        return array("I", token_ids[:count])
    except (OverflowError, TypeError):
        # The hasher raises the error, if there is one.
        return None


def _keys(context: _Context, tokens: Tokens, block_size: int) -> list[_Key]:
    """Return the keys of the beginnings of 4, 8, 16 … blocks, shortest first."""
    view = memoryview(tokens)
    keys: list[_Key] = []
    checksum, done, blocks = 0, 0, _FEWEST_BLOCKS
    while blocks * block_size <= len(tokens):
        checksum = zlib.crc32(view[done : blocks * block_size], checksum)
        keys.append((context, blocks, checksum))
        done = blocks * block_size
        blocks *= 2
    return keys


def _shared(one: Tokens, other: Tokens) -> int:
    """Count the equal leading tokens of two prompts."""
    length = min(len(one), len(other))
    mine = np.frombuffer(one, dtype=np.uint32, count=length)
    theirs = np.frombuffer(other, dtype=np.uint32, count=length)
    differs = mine != theirs
    first = int(differs.argmax())
    return first if differs[first] else length


def _alike(one: Sequence[BlockMmInfos], other: Sequence[BlockMmInfos], blocks: int) -> int:
    """Count the first ``blocks`` blocks that touch the same media; an empty list means no media."""
    mine, theirs = one or ((),) * blocks, other or ((),) * blocks
    if mine[:blocks] == theirs[:blocks]:
        return blocks
    pairs = zip(mine[:blocks], theirs[:blocks], strict=True)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

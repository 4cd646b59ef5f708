"""vLLM's block hashes, computed here so that they equal those in its KV events.

A block hash is ``sha256(cbor((parent hash, token ids, extra keys)))`` as in
``vllm.v1.core.kv_cache_utils.hash_block_tokens`` (0.32.0 and 0.33.0). Writing the CBOR directly
takes a fraction of the time and is tested against vLLM. Extra keys name the media that a block
touches, and where: ``block_mm_infos``. Workers ensure that no token after a block enters its hash,
as vLLM 0.33 would have it (``common/vllm_compat/features.py``).
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

from common.errors import ConfigurationError, RequestRejectedError
from common.identity import BlockHash, MmIdentifier
from frontend.router.hashing import cbor

MmInfo: TypeAlias = tuple[str, int]
"""``(identifier, offset)``: the item's first placeholder token relative to the
block's first token. Negative in a block that continues an item."""

BlockMmInfos: TypeAlias = tuple[MmInfo, ...]
"""The items one block touches, in prompt order."""

_NO_MEDIA: BlockMmInfos = ()


class MediaSpan(NamedTuple):
    """Placeholder range of one media item in a prompt.

    The length includes tokens that an ``is_embed`` mask leaves to text: vLLM hashes the range.
    """

    identifier: MmIdentifier
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def block_mm_infos(
    num_tokens: int, block_size: int, spans: Sequence[MediaSpan]
) -> list[BlockMmInfos]:
    """Return the media items that each full block of a prompt touches, an entry per full block.

    Args:
        spans: media items by offset, as vLLM keeps them. They may overlap, as sound and picture of
            one video do; for a block inside the first of them vLLM names only that one, and so does
            this.
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
    """Embeddings of a whole prompt, a row per token: for plain tokens, the filler sent to the
    engine.
    """

    data: memoryview
    rows: int

    def digests(self, block_size: int) -> list[bytes]:
        """Return the SHA-256 of the rows of each full block."""
        size = block_size * len(self.data) // max(self.rows, 1)
        starts = range(0, self.rows // block_size * size, size or 1)
        return [hashlib.sha256(self.data[start : start + size]).digest() for start in starts]


CANONICAL_ALGORITHMS = frozenset({"sha256_cbor"})
"""Values of vLLM's ``prefix_caching_hash_algo`` whose digest depends on the values alone and is the
same in every process. ``sha256`` and ``xxhash`` pickle, so their digest depends on which objects
are shared; ``xxhash_cbor`` draws a random seed."""


class LoraKey(NamedTuple):
    name: str
    path: str


class HashScheme(NamedTuple):
    """All inputs of a block's hash besides content; ``none_hash`` is the parent of first blocks."""

    block_size: int
    algorithm: str
    none_hash: bytes


class BlockHasher:
    """Hasher of a prompt's full blocks. Stateless, thread-safe. Raises ConfigurationError if the
    algorithm is not canonical or the block size not positive.
    """

    def __init__(self, block_size: int, algorithm: str, none_hash: bytes) -> None:
        _require_canonical(algorithm)
        if block_size < 1:
            raise ConfigurationError(f"block size must be positive, not {block_size}")
        self.scheme = HashScheme(block_size, algorithm, none_hash)

    def hash(
        self,
        token_ids: Sequence[int],
        mm_infos: Sequence[BlockMmInfos],
        *,
        lora: LoraKey | tuple[str, str] | None = None,
        cache_salt: str | None = None,
        embeds_digests: Sequence[bytes] | None = None,
        parent: BlockHash | None = None,
    ) -> list[BlockHash]:
        """Return the hashes of all full blocks, each chained to the one before.

        Args:
            mm_infos: one entry per full block, from :func:`block_mm_infos`; empty for a prompt
                without media.
            lora: name and path of the request's adapter.
            cache_salt: enters the first block only.
            embeds_digests: per full block, the SHA-256 of its prompt embeddings.
            parent: the block before the first, if this is the rest of a prompt; then ``mm_infos``
                is its rest too, and ``cache_salt`` is not used.

        Raises:
            RequestRejectedError: a token id or string has no encoding, so no worker could hash the
                prompt either.
        """
        block_size, _, none_hash = self.scheme
        salt = cache_salt if parent is None else None
        try:
            blocks = len(token_ids) // block_size
            tails = self._tails(blocks, mm_infos, lora, salt, embeds_digests)
            # Blocks without extra keys all end alike, so the encoder appends that end.
            data, ends = cbor.unsigned_arrays(
                token_ids, block_size, cbor.NULL if tails is None else b""
            )
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise RequestRejectedError(f"the prompt can't be hashed: {error}") from error
        sha256 = hashlib.sha256
        before = _BEFORE_PARENT
        last: bytes = none_hash if parent is None else parent
        hashes: list[bytes] = []
        append = hashes.append
        start = 0
        if tails is None:
            for end in ends[1:]:
                last = sha256(before + last + data[start:end]).digest()
                append(last)
                start = end
        else:
            for end, tail in zip(ends[1:], tails, strict=True):
                last = sha256(before + last + data[start:end] + tail).digest()
                append(last)
                start = end
        # Calling BlockHash per block would add a tenth of the time.
        return cast(list[BlockHash], hashes)

    def _tails(
        self,
        blocks: int,
        mm_infos: Sequence[BlockMmInfos],
        lora: tuple[str, str] | None,
        cache_salt: str | None,
        embeds_digests: Sequence[bytes] | None,
    ) -> list[bytes] | None:
        """Return each block's extra keys in CBOR, in vLLM's order; ``None`` if no block has any."""
        special = [block for block, infos in enumerate(mm_infos) if infos]
        if cache_salt and blocks and not (mm_infos and mm_infos[0]):
            special.append(0)
        if embeds_digests is not None:
            special = list(range(blocks))
        if lora is None and not special:
            return None
        adapter = [] if lora is None else [_LORA + cbor.text(lora[0]) + cbor.text(lora[1])]
        tails = [_extra_keys(adapter)] * blocks
        before_one = cbor.array_head(len(adapter) + 1) + b"".join(adapter)
        names = (
            {
                identifier: _MM + cbor.text(identifier)
                for identifier in {info[0] for block in special for info in mm_infos[block]}
            }
            if mm_infos
            else {}
        )
        integer = cbor.integer
        for block in special:
            infos = mm_infos[block] if mm_infos else ()
            if len(infos) == 1 and block and embeds_digests is None:
                identifier, offset = infos[0]
                tails[block] = before_one + names[identifier] + integer(offset)
                continue
            keys = [*adapter, *(names[name] + integer(offset) for name, offset in infos)]
            if block == 0 and cache_salt:
                keys.append(_SALT + cbor.text(cache_salt))
            if embeds_digests is not None:
                keys.append(_EMBEDS + cbor.byte_string(embeds_digests[block]))
            tails[block] = _extra_keys(keys)
        return tails


def _extra_keys(keys: list[bytes]) -> bytes:
    return cbor.array_head(len(keys)) + b"".join(keys) if keys else cbor.NULL


# The head of the tuple (parent, tokens, extra keys), then that of its first item.
_BEFORE_PARENT = cbor.array_head(3) + cbor.byte_string(bytes(32))[:-32]
# Heads of the extra keys: tuples of a tag and one or two values.
_LORA = cbor.array_head(3) + cbor.text("lora")
_MM = cbor.array_head(3) + cbor.text("mm")
_SALT = cbor.array_head(2) + cbor.text("cache_salt")
_EMBEDS = cbor.array_head(2) + cbor.text("prompt_embeds")


def _require_canonical(algorithm: str) -> None:
    if algorithm not in CANONICAL_ALGORITHMS:
        allowed = ", ".join(sorted(CANONICAL_ALGORITHMS))
        raise ConfigurationError(
            f"block hashes of {algorithm!r} can't be computed outside the worker: "
            f"start workers with --prefix-caching-hash-algo {allowed}"
        )

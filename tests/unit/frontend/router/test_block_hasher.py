"""Block hashes equal those vLLM's scheduler computes for the same request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigurationError, RequestRejectedError
from common.identity import MmIdentifier
from frontend.router.hashing.block_hasher import (
    BlockHasher,
    LoraKey,
    MediaSpan,
    block_mm_infos,
)
from tests.fakes.none_hash import none_hash_for
from tests.unit.frontend.router.vllm_requests import media_spans, vllm_request

NONE_HASH = none_hash_for("sha256_cbor")

token_ids = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 200_000), st.integers(0, 2**32 - 1)), max_size=200
)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(max_examples=300)
@given(
    tokens=token_ids,
    block_size=st.integers(1, 40),
    spans=media_spans(max_position=220, overlapping=False),
    lora=st.none() | st.tuples(words, words),
    cache_salt=st.none() | words,
)
def test_equal_to_vllm(
    tokens: list[int],
    block_size: int,
    spans: list[MediaSpan],
    lora: tuple[str, str] | None,
    cache_salt: str | None,
) -> None:
    request = vllm_request(tokens, spans, lora=lora, cache_salt=cache_salt, block_size=block_size)
    ours = BlockHasher(block_size, "sha256_cbor", NONE_HASH).hash(
        tokens,
        block_mm_infos(len(tokens), block_size, spans),
        lora=None if lora is None else LoraKey(*lora),
        cache_salt=cache_salt,
    )
    assert ours == request.block_hashes


def test_several_images_in_a_block_and_across_borders() -> None:
    tokens = list(range(64))
    spans = [
        MediaSpan(MmIdentifier("x"), 3, 4),
        MediaSpan(MmIdentifier("y"), 9, 2),
        MediaSpan(MmIdentifier("x"), 14, 40),
    ]
    request = vllm_request(tokens, spans, block_size=16)
    ours = BlockHasher(16, "sha256_cbor", NONE_HASH).hash(tokens, block_mm_infos(64, 16, spans))
    assert ours == request.block_hashes
    assert len(ours) == 4


def test_different_pictures_under_the_same_tokens_differ() -> None:
    hasher = BlockHasher(4, "sha256_cbor", NONE_HASH)
    one, other = (
        hasher.hash([5] * 8, block_mm_infos(8, 4, [MediaSpan(MmIdentifier(name), 2, 4)]))
        for name in ("one", "other")
    )
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_an_empty_salt_is_no_salt() -> None:
    hasher = BlockHasher(4, "sha256_cbor", NONE_HASH)
    assert hasher.hash([1] * 4, (), cache_salt="") == hasher.hash([1] * 4, ())


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash", "xxhash_cbor", "md5"])
def test_algorithms_that_differ_between_processes_are_refused(algorithm: str) -> None:
    with pytest.raises(ConfigurationError, match="--prefix-caching-hash-algo sha256_cbor"):
        BlockHasher(16, algorithm, NONE_HASH)


def test_a_block_size_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match="positive"):
        BlockHasher(0, "sha256_cbor", NONE_HASH)


@pytest.mark.parametrize(
    ("tokens", "salt"), [([-1] * 4, None), ([1] * 4, "\ud800"), (["x"] * 4, None)]
)
def test_what_has_no_encoding_is_rejected_as_the_users_error(
    tokens: list[int], salt: str | None
) -> None:
    with pytest.raises(RequestRejectedError, match="can't be hashed"):
        BlockHasher(4, "sha256_cbor", NONE_HASH).hash(tokens, (), cache_salt=salt)

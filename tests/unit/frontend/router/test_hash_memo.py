"""The memo gives the hashes a hasher would, however much prompts share."""

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RequestRejectedError
from common.identity import BlockHash, MmIdentifier
from frontend.router.hashing.block_hasher import (
    BlockHasher,
    BlockMmInfos,
    MediaSpan,
    block_mm_infos,
)
from frontend.router.hashing.hash_memo import HashMemo

SIZE = 4


class CountingHasher(BlockHasher):
    """Counts the blocks that it hashes."""

    hashed = 0

    def hash(self, *args: Any, **kwargs: Any) -> list[BlockHash]:
        hashes = super().hash(*args, **kwargs)
        self.hashed += len(hashes)
        return hashes


def memo(max_tokens: int = 10_000) -> HashMemo:
    return HashMemo(CountingHasher(SIZE, "sha256_cbor", bytes(32)), max_tokens)


def hashed(one: HashMemo) -> int:
    assert isinstance(one._hasher, CountingHasher)
    return one._hasher.hashed


def plain(
    tokens: list[int],
    infos: list[BlockMmInfos],
    lora: tuple[str, str] | None = None,
    salt: str | None = None,
) -> list[BlockHash]:
    hasher = BlockHasher(SIZE, "sha256_cbor", bytes(32))
    return hasher.hash(tokens, infos, lora=lora, cache_salt=salt)


def test_a_conversation_hashes_only_what_is_new() -> None:
    one, tokens = memo(), list(range(400))
    for length in (100, 200, 399):
        assert one.hash(tokens[:length], ()) == plain(tokens[:length], [])
    assert hashed(one) == 25 + 25 + 49
    # Each turn contains the one before, which is forgotten.
    assert (len(one._prompts), one._prompts.weight) == (1, 396)


def test_prompts_with_one_beginning() -> None:
    one, beginning = memo(), list(range(80))
    for number in range(3):
        tokens = [*beginning, *range(1000 * number, 1000 * number + 40)]
        assert one.hash(tokens, ()) == plain(tokens, [])
    assert hashed(one) == 3 * 30 - 2 * 20


def test_a_picture_ends_what_is_shared() -> None:
    one, tokens = memo(), [7] * 80
    infos = [
        block_mm_infos(80, SIZE, [MediaSpan(MmIdentifier(name), 40, 20)]) for name in ("a", "b")
    ]
    for each in (infos[0], infos[1], [], infos[0]):
        assert one.hash(tokens, each) == plain(tokens, each)
    assert hashed(one) == 4 * 20 - 3 * 10


def test_adapters_and_salts_share_nothing() -> None:
    one, tokens = memo(), list(range(64))
    for lora in (None, ("n", "p"), ("n", "q")):
        for salt in (None, "s"):
            assert one.hash(tokens, (), lora=lora, cache_salt=salt) == plain(tokens, [], lora, salt)
    assert hashed(one) == 6 * 16
    assert one.hash(tokens, (), cache_salt="s") == plain(tokens, [], salt="s")
    assert hashed(one) == 6 * 16


def test_room_is_bounded() -> None:
    one = memo(max_tokens=200)
    for number in range(50):
        one.hash(list(range(number * 100, number * 100 + 64)), ())
        assert one._prompts.weight <= 200
    one.hash(list(range(1000)), ())
    assert one._prompts.weight <= 200
    assert len(one._by_key) == sum(len(prompt.keys) for prompt in one._prompts)


def test_without_room_nothing_is_remembered() -> None:
    one, tokens = memo(max_tokens=0), list(range(64))
    assert one.hash(tokens, ()) == one.hash(tokens, ()) == plain(tokens, [])
    assert len(one._prompts) == 0


def test_prompt_embeddings_are_not_remembered() -> None:
    one, tokens = memo(), [0] * 64
    digests = [[bytes([number]) * 32] * 16 for number in range(2)]
    first, second = (one.hash(tokens, (), embeds_digests=each) for each in digests)
    assert first != second
    assert len(one._prompts) == 0


@pytest.mark.parametrize("token", [-1, 2**32])
def test_impossible_tokens_are_refused(token: int) -> None:
    with pytest.raises(RequestRejectedError):
        memo().hash([token] * 32, ())


def test_threads() -> None:
    one, failures = memo(max_tokens=2_000), []
    beginning = list(range(200))

    def work(number: int) -> None:
        for turn in range(100):
            tokens = [*beginning[: 40 + turn], *range(number * 100, number * 100 + turn)]
            if one.hash(tokens, ()) != plain(tokens, []):
                failures.append(tokens)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


tokens_of_few_kinds = st.lists(st.integers(0, 1), max_size=90)
contexts = st.sampled_from([(None, None), (None, None), (("n", "p"), None), (None, "s")])


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 90),
            tokens_of_few_kinds,
            st.none() | st.integers(0, 80),
            contexts,
        ),
        max_size=8,
    )
)
def test_equal_to_the_hasher_for_prompts_that_grow_from_each_other(
    steps: list[tuple[int, list[int], int | None, tuple[tuple[str, str] | None, str | None]]],
) -> None:
    one = memo(max_tokens=300)
    last: list[int] = []
    for keep, more, image, (lora, salt) in steps:
        last = last[:keep] + more
        spans = [] if image is None else [MediaSpan(MmIdentifier("i"), image, 9)]
        infos = block_mm_infos(len(last), SIZE, spans)
        assert one.hash(last, infos, lora=lora, cache_salt=salt) == plain(last, infos, lora, salt)

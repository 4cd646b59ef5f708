"""Messages are read as vLLM writes them; anything else is named and refused."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import MEDIUM_GPU, KVCacheEvent

from frontend.router.event_wire import (
    NOTHING,
    Cleared,
    MalformedEventError,
    Need,
    Removed,
    Stored,
    decode_batch,
    decode_sequence,
)
from tests.fakes.kv_events import (
    BLOCK_SIZE,
    block,
    blocks,
    cleared,
    encode,
    removed,
    stored,
)


def test_all_kinds_of_event_in_order() -> None:
    batch = decode_batch(encode([stored(1, 2), removed(1), cleared()], time=5.0))
    assert batch.time == 5.0
    assert batch.changes == [
        Stored(blocks(1, 2), BLOCK_SIZE, 0, Need.EVERY, 0, "full_attention", False, None, True),
        Removed(blocks(1), 0, False),
        Cleared(),
    ]


def test_blocks_that_leave_others_out_are_not_chained() -> None:
    tokens = list(range(3 * BLOCK_SIZE))
    changes = decode_batch(
        encode([stored(1, 3, token_ids=tokens), stored(1, medium="CPU"), stored(1)])
    ).changes
    assert [isinstance(one, Stored) and one.chained for one in changes] == [False, False, True]


def test_what_vllm_calls_the_device_is_not_offloaded() -> None:
    changes = decode_batch(encode([stored(1, medium=MEDIUM_GPU)])).changes
    assert [isinstance(one, Stored) and one.offloaded for one in changes] == [False]


def test_the_parent_is_passed_on() -> None:
    (change,) = decode_batch(encode([stored(2, parent_block_hash=block(1))])).changes
    assert isinstance(change, Stored)
    assert change.parent == block(1)


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_groups_in_which_every_block_counts(kind: str | None) -> None:
    (change,) = decode_batch(encode([stored(1, kv_cache_spec_kind=kind)])).changes
    assert isinstance(change, Stored)
    assert change.need is Need.EVERY


@pytest.mark.parametrize(
    ("kind", "window", "need", "tokens"),
    [
        ("sliding_window", 128, Need.WINDOW, 128),
        ("sliding_window_mla", 64, Need.WINDOW, 64),
        ("sliding_window", None, Need.UNKNOWN, 0),
        ("mamba", None, Need.WINDOW, 1),
        ("chunked_local_attention", None, Need.UNKNOWN, 0),
        ("invented_in_2030", None, Need.UNKNOWN, 0),
    ],
)
def test_other_groups(kind: str, window: int | None, need: Need, tokens: int) -> None:
    event = stored(1, group_idx=2, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window)
    (change,) = decode_batch(encode([event])).changes
    assert isinstance(change, Stored)
    assert (change.need, change.window, change.group) == (need, tokens, 2)


def test_offloaded_copies_are_told_apart() -> None:
    changes = decode_batch(encode([stored(1, medium="CPU"), removed(1, medium="CPU")])).changes
    assert [change.offloaded for change in changes if not isinstance(change, Cleared)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("fields", [{"medium": "STORAGE"}, {"medium": "CPU", "locality": "REMOTE"}])
def test_shared_storage_says_nothing_about_a_worker(fields: dict[str, str]) -> None:
    assert decode_batch(encode([stored(1, **fields), removed(1, **fields)])).changes == []


def test_fields_of_the_future_are_ignored() -> None:
    event = msgspec.to_builtins(stored(1), builtin_types=(bytes,)) | {"colour": "blue"}
    payload = msgspec.msgpack.encode([1.0, [event], 0, {"more": [1]}])
    assert decode_batch(payload).changes == decode_batch(encode([stored(1)])).changes


def test_fields_of_the_past_may_lack() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": blocks(1),
        "parent_block_hash": None,
        "token_ids": [1],
        "block_size": 1,
        "lora_id": None,
        "medium": None,
        "lora_name": None,
    }
    (change,) = decode_batch(msgspec.msgpack.encode([1.0, [event]])).changes
    assert change == Stored(blocks(1), 1, 0, Need.EVERY, 0, "unnamed", False, None, True)


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", "payload"),
        (b"\x00", "payload"),
        (encode([stored(1)])[:-5], "payload"),
        (msgspec.msgpack.encode([1.0, [{"type": "BlockMelted"}]]), "payload"),
        (msgspec.msgpack.encode([1.0, "no events"]), "payload"),
        (encode([stored(1, block_hashes=[7])]), "integer-hashes"),
        (encode([stored(1, block_hashes=[b"short"])]), "hash-length"),
        (encode([stored(1, block_hashes=[b"x" * 31, b"x" * 33])]), "hash-length"),
        (encode([stored(1, group_idx=-1)]), "group"),
        (encode([removed(1, group_idx=10**6)]), "group"),
    ],
)
def test_malformed_messages_are_named(payload: bytes, kind: str) -> None:
    with pytest.raises(MalformedEventError) as caught:
        decode_batch(payload)
    assert caught.value.kind == kind


@given(st.binary(max_size=200))
def test_noise_never_gets_through_otherwise(noise: bytes) -> None:
    with contextlib.suppress(MalformedEventError):
        decode_batch(noise)


def many(count: int, *last: KVCacheEvent) -> bytes:
    return encode([*(stored(number) for number in range(count)), *last])


def test_a_large_message_is_decoded_as_it_is_used() -> None:
    batch = decode_batch(many(20_000, removed(7), stored(1, medium="STORAGE"), cleared()))
    assert len(batch.changes) < 20_000
    later = list(batch.later)
    assert len(batch.changes) + len(later) == 20_003
    assert later[-3:] == [Removed(blocks(7), 0, False), NOTHING, Cleared()]
    assert [one.hashes for one in [*batch.changes, *later[:-3]] if isinstance(one, Stored)] == [
        blocks(number) for number in range(20_000)
    ]


def test_events_of_many_blocks_are_decoded_as_they_are_used() -> None:
    large = removed(*range(10_000))
    batch = decode_batch(encode([large] * 10))
    first = sum(len(one.hashes) for one in batch.changes if isinstance(one, Removed))
    assert first == 20_000
    rest = sum(len(one.hashes) for one in batch.later if isinstance(one, Removed))
    assert first + rest == 100_000


def test_what_is_malformed_far_behind_is_found_when_it_is_reached() -> None:
    batch = decode_batch(many(20_000, stored(1, block_hashes=[b"short"])))
    with pytest.raises(MalformedEventError, match="32 bytes"):
        list(batch.later)


def test_an_event_of_more_blocks_than_any_has_is_malformed() -> None:
    with pytest.raises(MalformedEventError) as caught:
        decode_batch(encode([removed(block_hashes=[bytes(32)] * (1 << 19))]))
    assert caught.value.kind == "hash-count"


def test_tokens_and_keys_are_passed_over() -> None:
    keys: list[tuple[list[list[int]]]] = [([[]],)] * 1000
    (change,) = decode_batch(encode([stored(1, token_ids=[5] * 16, extra_keys=keys)])).changes
    assert change == decode_batch(encode([stored(1, token_ids=[5] * 16)])).changes[0]


@pytest.mark.parametrize("field", ["token_ids", "block_hashes"])
def test_something_else_where_a_list_has_to_be(field: str) -> None:
    event = msgspec.to_builtins(stored(1), builtin_types=(bytes,)) | {field: "none"}
    with pytest.raises(MalformedEventError):
        decode_batch(msgspec.msgpack.encode([1.0, [event], 0]))


def test_sequence_numbers() -> None:
    assert decode_sequence(b"\x00" * 7 + b"\x09") == 9
    with pytest.raises(MalformedEventError, match="3 bytes"):
        decode_sequence(b"abc")

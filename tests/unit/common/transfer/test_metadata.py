import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptSegmentError, ProtocolError
from common.identity import MmHash
from common.transfer.handshake import MAX_REFUSAL_LEN, TransferReply, parse_offer, parse_reply
from common.transfer.metadata import (
    InlineMetadata,
    NixlMetadata,
    ShmMetadata,
    TransferMetadata,
    decode_metadata,
    encode_metadata,
)

ITEM: Any = {"mm_hash": MmHash("ab" * 32), "envelope_size": 10, "buffer_sizes": (5, 0)}
ALL: list[TransferMetadata] = [
    ShmMetadata(arena="a", offset=4096, generation=2**64 - 1, **ITEM),
    NixlMetadata(agent="f", offset=4096, generation=3, checksum="ab" * 16, **ITEM),
    InlineMetadata(first_frame=3, **ITEM),
]


@pytest.mark.parametrize("metadata", ALL)
def test_round_trip(metadata: TransferMetadata) -> None:
    assert decode_metadata(encode_metadata(metadata)) == metadata
    assert metadata.nbytes == 15


@pytest.mark.parametrize("metadata", ALL)
@pytest.mark.parametrize(
    "change",
    [
        {"transport": "carrier pigeon"},
        {"mm_hash": ""},
        {"mm_hash": 5},
        {"envelope_size": -1},
        {"envelope_size": "10"},
        {"envelope_size": 2**63},
        {"envelope_size": 2**21},
        {"buffer_sizes": [-1]},
        {"buffer_sizes": [1.5]},
        {"buffer_sizes": [1] * 5000},
        {"buffer_sizes": None},
        {"more": 1},
    ],
)
def test_values_that_cannot_be(metadata: TransferMetadata, change: dict[str, Any]) -> None:
    values = json.loads(encode_metadata(metadata)) | change
    with pytest.raises(CorruptSegmentError):
        decode_metadata(json.dumps(values).encode())


@pytest.mark.parametrize("name", ["mm_hash", "offset", "generation", "arena", "transport"])
def test_missing_values(name: str) -> None:
    values = json.loads(encode_metadata(ALL[0]))
    del values[name]
    with pytest.raises(CorruptSegmentError):
        decode_metadata(json.dumps(values).encode())


@given(st.binary(max_size=60))
def test_noise(noise: bytes) -> None:
    with pytest.raises(CorruptSegmentError):
        decode_metadata(noise)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"buffer_sizes": ["x"] * 4096}, r"buffer_sizes\.0: "),
        ({"buffer_sizes": ["x"] * 200_000}, "members"),
        ({str(i): 1 for i in range(200_000)}, "bytes"),
        ({"x" * 500_000: 1}, "shm"),
        ({"a\nb": 1}, r"'shm.a\\nb': "),
    ],
)
def test_what_is_wrong_is_said_on_one_short_line(change: dict[str, Any], said: str) -> None:
    values = json.loads(encode_metadata(ALL[0])) | change
    with pytest.raises(CorruptSegmentError, match=said) as caught:
        decode_metadata(json.dumps(values).encode())
    message = str(caught.value)
    assert len(message) < 300 and message.isprintable()


LETTERS = json.dumps({"refusals": [1] * 100_000}).encode()


@pytest.mark.parametrize("read", [parse_offer, parse_reply])
@pytest.mark.parametrize(
    "said", [LETTERS, b'{"shm": ' + b"[" * 100_000, b'{"refusals": "' + b"x" * 10_000_000 + b'"}']
)
def test_what_is_said_of_transports_is_refused_on_one_short_line(
    read: Callable[[bytes], object], said: bytes
) -> None:
    with pytest.raises(ProtocolError) as caught:
        read(said)
    message = str(caught.value)
    assert len(message) < 300 and message.isprintable()


def test_a_workers_reasons_are_short_lines() -> None:
    reasons = ("it\nhas", "x" * 100_000)
    reply = parse_reply(
        TransferReply(refusals=())
        .model_copy(update={"refusals": reasons})
        .model_dump_json()
        .encode()
    )
    assert reply.refusals == ("it has", "x" * MAX_REFUSAL_LEN + "...")

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptSegmentError
from common.identity import MmHash
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

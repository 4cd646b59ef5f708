"""JSON of peers: what it may cost, and how what is wrong is said."""

import json

import pytest
from pydantic import BaseModel, TypeAdapter

from common.bounded_json import JsonLimits, MalformedJsonError

LIMITS = JsonLimits(most_bytes=1000, most_commas=10)


class Thing(BaseModel, extra="forbid"):
    names: list[str]


ADAPTER = TypeAdapter(Thing)


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_what_fits_is_read(kind: type[bytes]) -> None:
    data = json.dumps({"names": ["x"] * 11}).encode()
    assert LIMITS.read(ADAPTER, kind(data)) == Thing(names=["x"] * 11)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"names": ["x"] * 12}, "it has more than 10 members"),
        ({"names": ["x" * 1000]}, "it has 1015 bytes, and may have 1000 at most"),
        ({"names": [1, 2]}, "names.0: Input should be a valid string"),
        ({"names": [], "a\nb": 1}, r"'a\nb': Extra inputs are not permitted"),
        ({"names": [], "x" * 200: 1}, f"'{'x' * 128}': Extra inputs are not permitted"),
        ([], "Input should be an object"),
    ],
)
def test_what_is_wrong_first_is_said_on_one_line(data: object, said: str) -> None:
    with pytest.raises(MalformedJsonError) as caught:
        LIMITS.read(ADAPTER, json.dumps(data).encode())
    assert str(caught.value) == said

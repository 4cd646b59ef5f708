"""Good input with something wrong in it."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st


def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes with some of them changed, and perhaps an end cut off or put on."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        if changed:
            changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(changed)) | st.just(0) | st.just(0))
    return bytes(changed[: len(changed) - cut]) + draw(st.just(b"") | st.binary(max_size=8))


@st.composite
def damaged_bytes(draw: st.DrawFn, originals: Sequence[bytes]) -> bytes:
    return damaged(draw, draw(st.sampled_from(originals)))


@st.composite
def damaged_frames(draw: st.DrawFn, originals: Sequence[list[bytes]]) -> list[bytes]:
    frames = [damaged(draw, frame) for frame in draw(st.sampled_from(originals))]
    if draw(st.booleans()):
        del frames[draw(st.integers(0, len(frames) - 1))]
    if draw(st.booleans()):
        frames.insert(draw(st.integers(0, len(frames))), draw(st.binary(max_size=16)))
    return frames


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../../etc/passwd", "\x00", "tcp://[::1", "9" * 5000, "image", "shm"])
)


VALUES = st.recursive(
    SCALARS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a value of lists and dicts."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            found += places(inner, (*path, key))
    return found


def replaced(draw: st.DrawFn, value: Any, new: st.SearchStrategy[Any]) -> Any:
    """A value of lists and dicts with something else in one of its places."""
    value = msgspec.msgpack.decode(msgspec.msgpack.encode(value), strict=False)
    *way, last = draw(st.sampled_from(places(value)))
    inner = value
    for step in way:
        inner = inner[step]
    inner[last] = draw(new)
    return value


@st.composite
def hostile_frames(draw: st.DrawFn, originals: Sequence[list[bytes]]) -> list[bytes]:
    """A message with one value of another kind or size."""
    count, head, *rest = draw(st.sampled_from(originals))
    value = replaced(draw, msgspec.msgpack.decode(head), VALUES)
    return [count, msgspec.msgpack.encode(value), *rest]


@st.composite
def hostile_json(draw: st.DrawFn, originals: Sequence[bytes]) -> bytes:
    value = replaced(draw, json.loads(draw(st.sampled_from(originals))), SCALARS)
    return json.dumps(value).encode()

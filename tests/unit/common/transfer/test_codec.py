import contextlib
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.v1.serial_utils import CUSTOM_TYPE_CLOUDPICKLE, CUSTOM_TYPE_PICKLE

from common.errors import CorruptSegmentError, UnsupportedItemError
from common.transfer.codec import INLINE_BELOW, EncodedItem, decode, encode
from tests.unit.common.transfer.items import image, items, same, tensors_of

BATCHED = MultiModalFieldConfig.batched("image").field


def one_field(data: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({"x": MultiModalFieldElem(data=data, field=BATCHED)})


def writable(encoded: EncodedItem) -> list[memoryview]:
    return [memoryview(bytearray(buffer)) for buffer in encoded.buffers]


@given(items())
@settings(max_examples=150, deadline=None)
def test_every_item_comes_back_as_it_was(item: MultiModalKwargsItem) -> None:
    encoded = encode(item)
    assert same(decode(encoded.envelope, writable(encoded)), item)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(0, 7, dtype=torch.bfloat16),
        torch.tensor(3.5),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.randn(50, 40).bfloat16(),
        torch.randn(50, 40).T,
        torch.randn(50, 40)[::2, 1::3],
        torch.randn(1000, requires_grad=True).detach(),
    ],
)
def test_tensors_of_all_layouts(tensor: torch.Tensor) -> None:
    encoded = encode(one_field(tensor))
    assert same(decode(encoded.envelope, writable(encoded)), one_field(tensor))


def test_contiguous_tensors_are_not_copied_in_either_direction() -> None:
    item = image(7)
    pixels = item["pixel_values"].data
    encoded = encode(item)
    assert np.frombuffer(encoded.buffers[0], np.uint8).ctypes.data == pixels.data_ptr()
    memory = bytearray(encoded.buffers[0])
    decoded = decode(encoded.envelope, [memoryview(memory)])
    memory[0] = 250
    assert decoded["pixel_values"].data[0, 0] == 250


def test_small_tensors_own_their_memory() -> None:
    """The envelope may be in memory that is reused."""
    encoded = encode(one_field(torch.arange(4)))
    assert not encoded.buffers
    envelope = bytearray(encoded.envelope)
    decoded = decode(memoryview(envelope), [])
    envelope[:] = bytes(len(envelope))
    assert decoded["x"].data.tolist() == [0, 1, 2, 3]


def test_threshold_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "1")
    assert not encode(one_field(torch.zeros(INLINE_BELOW - 1, dtype=torch.uint8))).buffers
    assert encode(one_field(torch.zeros(INLINE_BELOW, dtype=torch.uint8))).buffers


def test_encode_from_many_threads_at_once() -> None:
    results: dict[int, bool] = {}

    def work(seed: int) -> None:
        for _ in range(50):
            encoded = encode(image(seed))
            results[seed] = same(decode(encoded.envelope, writable(encoded)), image(seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


class Opaque:
    pass


@pytest.mark.parametrize("insecure", ["0", "1"])
@pytest.mark.parametrize("data", [Opaque(), "text", {"a": 1}, [torch.zeros(2), Opaque()], len])
def test_encoder_refuses_what_would_need_pickle(
    monkeypatch: pytest.MonkeyPatch, insecure: str, data: object
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", insecure)
    with pytest.raises(UnsupportedItemError):
        encode(one_field(data))


# Hostile envelopes. `element` is a correct one to break.


def element(data: Any, field: Any = ("batched", {})) -> dict[str, Any]:
    return {"x": {"data": data, "field": field}}


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def raw(data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(3, data)


def test_the_envelope_that_the_hostile_ones_are_made_of_is_correct() -> None:
    buffer = memoryview(bytearray(300))
    assert decode(packed(element(["uint8", [300], 1])), [buffer])["x"].data.shape == (300,)
    assert decode(packed(element(["int32", [2], raw(bytes(8))])), [])["x"].data.shape == (2,)


@pytest.mark.parametrize(
    "value",
    [
        # dtype
        element(["float31", [300], 1]),
        element(["load", [300], 1]),
        element(["nn", [300], 1]),
        element(["__class__", [300], 1]),
        element(["", [300], 1]),
        # shape and size
        element(["uint8", [299], 1]),
        element(["uint8", [301], 1]),
        element(["int64", [300], 1]),
        element(["uint8", [-300], 1]),
        element(["uint8", [-1], 1]),
        element(["uint8", [-20, -15], 1]),
        element(["uint8", [300.0], 1]),
        element(["uint8", [True], 1]),
        element(["uint8", ["300"], 1]),
        element(["uint8", 300, 1]),
        element(["uint8", [1] * 40 + [300], 1]),
        element(["uint8", [2**63, 2**63], 1]),
        element(["uint8", [2**62, 0], raw(b"")]),
        element(["int32", [2], raw(bytes(7))]),
        # buffer index
        element(["uint8", [300], 0]),
        element(["uint8", [300], -1]),
        element(["uint8", [300], 2]),
        element(["uint8", [300], 2**63]),
        element(["uint8", [300], True]),
        element(["uint8", [300], None]),
        element(["uint8", [300], {"name": "psm_1"}]),
        element(["uint8", [300], bytes(300)]),
        element(["uint8", [300], "1"]),
        element([["uint8", [300], 1], ["uint8", [300], 1]]),
        element(None),
        element(1.5),
        element(["uint8", [300]]),
        element(["uint8", [300], 1, 1]),
        # nesting
        element([[[[[[[[[[[["uint8", [300], 1]]]]]]]]]]]]),
        element({"uint8": 1}),
        element("text"),
        # field
        element(["uint8", [300], 1], ("__init__", {})),
        element(["uint8", [300], 1], ("build_elems", {})),
        element(["uint8", [300], 1], ("flat_from_sizes", {"size_per_item": 1})),
        element(["uint8", [300], 1], ("batched", {"modality": "x"})),
        element(["uint8", [300], 1], ("batched", {"keep_on_cpu": 1})),
        element(["uint8", [300], 1], ("shared", {})),
        element(["uint8", [300], 1], ("shared", {"batch_size": "1"})),
        element(["uint8", [300], 1], ("flat", {"slices": 3})),
        element(["uint8", [300], 1], ("flat", {"slices": [3]})),
        element(["uint8", [300], 1], ("flat", {"slices": [[0, 1]]})),
        element(["uint8", [300], 1], ("flat", {"slices": [[0, 1, "x"]]})),
        element(["uint8", [300], 1], ("flat", {"slices": [[[0, 1, 2], 3]]})),
        element(["uint8", [300], 1], ("flat", {"slices": [], "dim": None})),
        element(["uint8", [300], 1], ("batched",)),
        element(["uint8", [300], 1], None),
        element(["uint8", [300], 1], [1, {}]),
        # shape of the whole
        [],
        None,
        {"x": 1},
        {"x": {"data": None}},
        {"x": {"data": None, "field": ("batched", {}), "more": 1}},
        {1: {"data": None, "field": ("batched", {})}},
    ],
)
def test_hostile_envelopes_are_refused(value: Any) -> None:
    with pytest.raises(CorruptSegmentError):
        decode(packed(value), [memoryview(bytearray(300))])


class Exploit:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return os.putenv, ("MMROUTER_TEST_EXPLOITED", "1")


@pytest.mark.parametrize(
    ("code", "payload"),
    [
        (CUSTOM_TYPE_PICKLE, pickle.dumps(Exploit())),
        (CUSTOM_TYPE_CLOUDPICKLE, cloudpickle.dumps(Exploit())),
        (99, b""),
    ],
)
@pytest.mark.parametrize("place", ["data", "bytes", "field"])
def test_pickle_never_runs_even_if_the_environment_allows_it(
    monkeypatch: pytest.MonkeyPatch, code: int, payload: bytes, place: str
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(pickle, "loads", _must_not_run)
    monkeypatch.setattr(cloudpickle, "loads", _must_not_run)
    extension = msgspec.msgpack.Ext(code, payload)
    value = {
        "data": element(extension),
        "bytes": element(["uint8", [len(payload)], extension]),
        "field": element(None, ("batched", {"keep_on_cpu": extension})),
    }[place]
    with pytest.raises(CorruptSegmentError):
        decode(packed(value), [])


def _must_not_run(data: bytes) -> object:
    pytest.fail("pickle was used")


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_noise_is_refused_or_is_an_item(noise: bytes) -> None:
    with contextlib.suppress(CorruptSegmentError):
        decode(noise, [])


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damage_is_refused_or_stays_within_the_buffers(data: st.DataObject) -> None:
    encoded = encode(image(7, rows=2))
    envelope = bytearray(encoded.envelope)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(envelope) - 1))
        envelope[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 8))
    try:
        item = decode(bytes(envelope[: len(envelope) - cut]), writable(encoded))
    except CorruptSegmentError:
        return
    assert sum(t.nbytes for e in item.values() for t in tensors_of(e.data)) <= encoded.nbytes

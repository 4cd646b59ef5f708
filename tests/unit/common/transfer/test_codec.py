import contextlib
import gc
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.v1.serial_utils import (
    CUSTOM_TYPE_CLOUDPICKLE,
    CUSTOM_TYPE_PICKLE,
    CUSTOM_TYPE_RAW_VIEW,
)

from common.errors import CorruptSegmentError, UnsupportedItemError
from common.transfer.arena import EncodedItem
from common.transfer.codec import INLINE_BELOW, MAX_NESTING, decode, encode
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


def test_larger_tensors_ride_beside_the_envelope() -> None:
    assert not encode(one_field(torch.zeros(INLINE_BELOW - 1, dtype=torch.uint8))).buffers
    assert encode(one_field(torch.zeros(INLINE_BELOW, dtype=torch.uint8))).buffers


def test_buffers_keep_their_tensors_alive() -> None:
    encoded = encode(one_field(torch.full((1000,), 7, dtype=torch.uint8)))
    gc.collect()
    torch.zeros(1000, dtype=torch.uint8)
    assert bytes(encoded.buffers[0]) == bytes([7]) * 1000


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


class OtherField(MultiModalBatchedField):
    pass


@pytest.mark.parametrize("insecure", ["0", "1"])
@pytest.mark.parametrize(
    "data",
    [
        Opaque(),
        "text",
        b"bytes",
        {"a": 1},
        len,
        2**80,
        np.zeros(3),
        [torch.zeros(2), Opaque()],
        [torch.zeros(2), None],
        torch.zeros(300).to_sparse(),
    ],
    ids=lambda data: type(data).__name__,
)
def test_what_is_no_tensor_is_refused_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, insecure: str, data: object
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", insecure)
    with pytest.raises(UnsupportedItemError):
        encode(one_field(data))


def test_fields_of_another_kind_are_refused() -> None:
    element = MultiModalFieldElem(data=torch.zeros(3), field=OtherField())
    with pytest.raises(UnsupportedItemError, match="OtherField"):
        encode(MultiModalKwargsItem({"x": element}))


def test_more_than_workers_take_is_refused() -> None:
    with pytest.raises(UnsupportedItemError, match="small ones"):
        encode(one_field([torch.zeros(60)] * 5000))
    with pytest.raises(UnsupportedItemError, match="4097 large tensors"):
        encode(one_field([torch.zeros(300)] * 4097))


# Hostile envelopes.

FIELD = ["batched", False]
TENSOR = ["tensor", "uint8", [300], 1, b""]


def envelope_of(data: Any, field: Any = FIELD) -> dict[str, Any]:
    return {"x": [data, field]}


def tensor(
    dtype: Any = "uint8", shape: Any = (300,), buffer: Any = 1, content: Any = b""
) -> dict[str, Any]:
    return envelope_of(["tensor", dtype, shape, buffer, content])


def read(value: Any) -> MultiModalKwargsItem:
    return decode(msgspec.msgpack.encode(value), [memoryview(bytearray(300))])


def nested(depth: int) -> Any:
    data: Any = TENSOR
    for _ in range(depth):
        data = ["list", [data]]
    return envelope_of(data)


def test_the_envelopes_that_the_hostile_ones_are_made_of_are_correct() -> None:
    assert read(tensor())["x"].data.shape == (300,)
    assert read(tensor("int32", [5, 15]))["x"].data.shape == (5, 15)
    assert read(nested(MAX_NESTING))
    inline = envelope_of(["list", [TENSOR, ["tensor", "int32", [2], 0, bytes(8)], 2, 2.5, True]])
    assert len(read(inline)["x"].data) == 5
    field = ["flat", False, 0, False, [[[0, 1, None]]]]
    assert read(envelope_of(TENSOR, field))["x"].field.slices == [slice(0, 1)]


@pytest.mark.parametrize(
    "value",
    [
        # dtype
        tensor("float31"),
        tensor("load"),
        tensor("nn"),
        tensor("__class__"),
        tensor(""),
        tensor(None),
        # shape and size
        tensor(shape=[299]),
        tensor(shape=[301]),
        tensor("int64", [300]),
        tensor(shape=[-300]),
        tensor(shape=[-20, -15]),
        tensor(shape=[300.0]),
        tensor(shape=[True]),
        tensor(shape=["300"]),
        tensor(shape=300),
        tensor(shape=[1] * 40 + [300]),
        tensor(shape=[2**63, 2**63]),
        tensor(shape=[300, 2**64 - 1, 0]),
        envelope_of(["list", [TENSOR, ["tensor", "uint8", [2**64 - 1, 0], 0, b""]]]),
        envelope_of(["list", [TENSOR, ["tensor", "uint8", [2**47, 2**47, 0], 0, b""]]]),
        envelope_of(["list", [TENSOR, ["tensor", "int32", [2], 0, bytes(7)]]]),
        # buffer
        tensor(buffer=-1),
        tensor(buffer=2),
        tensor(buffer=2**63),
        tensor(buffer=True),
        tensor(buffer=None),
        tensor(buffer="1"),
        tensor(buffer={"name": "psm_1"}),
        tensor(buffer=0, content=bytes(300)),
        tensor(content="text"),
        envelope_of(["list", [TENSOR, TENSOR]]),
        envelope_of(None),
        envelope_of(1.5),
        # nesting
        nested(MAX_NESTING + 1),
        nested(400),
        envelope_of(["list", [TENSOR, None]]),
        envelope_of(["tensor"]),
        envelope_of(["tensor", *TENSOR[1:], 1]),
        envelope_of(["pickle", b""]),
        envelope_of({"uint8": 1}),
        envelope_of("text"),
        envelope_of(b"bytes"),
        # field
        envelope_of(TENSOR, ["build_elems", False]),
        envelope_of(TENSOR, ["batched", 1]),
        envelope_of(TENSOR, ["batched", False, "more"]),
        envelope_of(TENSOR, ["shared", False]),
        envelope_of(TENSOR, ["shared", False, "1"]),
        envelope_of(TENSOR, ["flat", False, None, False, []]),
        envelope_of(TENSOR, ["flat", False, 0, False, [[[0, 1]]]]),
        envelope_of(TENSOR, ["flat", False, 0, False, [[[0, 1, "x"]]]]),
        envelope_of(TENSOR, ["flat", False, 0, False, [[[0, 1, 2], [0, 1, 2]]]]),
        envelope_of(TENSOR, ["flat", False, 0, False, [[]]]),
        envelope_of(TENSOR, None),
        envelope_of(TENSOR, [1, {}]),
        # shape of the whole
        [],
        None,
        {"x": 1},
        {"x": [TENSOR]},
        {"x": [TENSOR, FIELD, 1]},
        {1: [TENSOR, FIELD]},
    ],
    ids=lambda value: repr(value)[:60],
)
def test_hostile_envelopes_are_refused(value: Any) -> None:
    with pytest.raises(CorruptSegmentError):
        read(value)


def test_no_buffers_may_be_left_over() -> None:
    with pytest.raises(CorruptSegmentError, match="leaves 1 out"):
        read({})


class Exploit:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return os.putenv, ("MMROUTER_TEST_EXPLOITED", "1")


@pytest.mark.parametrize(
    ("code", "payload"),
    [
        (CUSTOM_TYPE_PICKLE, pickle.dumps(Exploit())),
        (CUSTOM_TYPE_CLOUDPICKLE, cloudpickle.dumps(Exploit())),
        (CUSTOM_TYPE_RAW_VIEW, bytes(300)),
    ],
)
@pytest.mark.parametrize("place", ["data", "content", "buffer", "field"])
def test_no_extension_type_is_read_even_if_the_environment_allows_pickle(
    monkeypatch: pytest.MonkeyPatch, code: int, payload: bytes, place: str
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(pickle, "loads", _must_not_run)
    monkeypatch.setattr(cloudpickle, "loads", _must_not_run)
    extension = msgspec.msgpack.Ext(code, payload)
    value = {
        "data": envelope_of(extension),
        "content": tensor(buffer=0, content=extension),
        "buffer": tensor(buffer=extension),
        "field": envelope_of(TENSOR, extension),
    }[place]
    with pytest.raises(CorruptSegmentError):
        read(value)


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
    assert sum(t.nbytes for e in item.values() for t in tensors_of(e.data)) <= (
        len(encoded.envelope) + sum(buffer.nbytes for buffer in encoded.buffers)
    )

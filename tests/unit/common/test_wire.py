import asyncio
import contextlib
import gc
import struct

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.metrics.stats import RequestStateStats

from common.errors import ProtocolError
from common.identity import Incarnation, MmHash, RequestId, WorkerId
from common.request_plane.loop_socket import Frame
from common.request_plane.protocol import (
    Abort,
    Ack,
    Failed,
    FailureKind,
    Goodbye,
    Hello,
    Leave,
    MediaPart,
    Nack,
    Output,
    Outputs,
    Ping,
    Status,
    Submit,
    Supply,
    ToFrontend,
    ToWorker,
    Welcome,
)
from common.request_plane.step_sums import RankStatus
from common.request_plane.wire import MAX_FRAME_BYTES, Codec, join, split

R = RequestId("r")
H = MmHash("h")


def views(frames: list[Frame]) -> list[memoryview]:
    return [memoryview(frame) for frame in frames]


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, Incarnation("f"), b"{}"),
        Submit(
            R,
            [1, 2, 3],
            SamplingParams(
                n=2,
                stop=["a"],
                seed=7,
                logprobs=3,
                output_kind=RequestOutputKind.DELTA,
                structured_outputs=StructuredOutputsParams(json={"type": "object"}),
            ),
            [MediaPart("image", H, 0, 2, b"\x01\x00"), MediaPart("image", H, 2, 1, None)],
            [b"{}"],
            cache_salt="salt",
            trace_headers={"traceparent": "x"},
        ),
        Supply(R, [b"{}"]),
        Abort(R),
        Ping(),
        Leave(),
    ],
)
def test_messages_to_a_worker_arrive_as_they_left(message: msgspec.Struct) -> None:
    codec: Codec[ToWorker] = Codec(ToWorker)
    decoded, media = codec.decode(views(codec.encode(message, [b"one", b"two"])))
    assert decoded == message
    assert [bytes(frame) for frame in media] == [b"one", b"two"]


@pytest.mark.parametrize(
    "message",
    [
        Welcome(1, WorkerId("w"), Incarnation("i"), b"{}"),
        Goodbye("why"),
        Ack(R, [H]),
        Nack(R, [H], "not_held"),
        Outputs(
            [
                Output(R, [CompletionOutput(1, "a", [7, 8], None, None)], finished=False),
                Output(
                    RequestId("q"),
                    [CompletionOutput(0, "x", [1], 0.5, [{1: Logprob(0.5, 1, "x")}])],
                    finished=True,
                    prompt_logprobs=[None, {2: Logprob(0.1, 2, "y")}],
                    metrics=RequestStateStats(num_generation_tokens=1),
                    num_cached_tokens=32,
                ),
            ]
        ),
        Failed(R, FailureKind.MEDIA, "why"),
        Status([RankStatus(0, 1, 2, 0.5, 3, 4, 5)], 6),
    ],
)
def test_messages_to_a_frontend_arrive_as_they_left(message: msgspec.Struct) -> None:
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    decoded, media = codec.decode(views(codec.encode(message)))
    assert decoded == message
    assert list(media) == []


def test_tensors_travel_beside_the_message() -> None:
    codec: Codec[ToWorker] = Codec(ToWorker)
    embeds = torch.arange(4096, dtype=torch.float32).reshape(32, 128)
    submit = Submit(R, None, SamplingParams(), [], [], prompt_embeds=embeds)
    frames = codec.encode(submit, [b"media"])
    decoded, media = codec.decode(views([frames[0], frames[1], bytearray(frames[2]), frames[3]]))
    assert isinstance(decoded, Submit) and decoded.prompt_embeds is not None
    assert torch.equal(decoded.prompt_embeds, embeds)
    assert [bytes(frame) for frame in media] == [b"media"]


def test_tensors_of_few_bytes_travel_within_it() -> None:
    codec: Codec[ToWorker] = Codec(ToWorker)
    submit = Submit(R, None, SamplingParams(), [], [], prompt_embeds=torch.arange(4.0))
    frames = [memoryview(bytearray(frame)) for frame in codec.encode(submit)]
    decoded, _ = codec.decode(frames)
    assert isinstance(decoded, Submit) and decoded.prompt_embeds is not None
    assert torch.equal(decoded.prompt_embeds, torch.arange(4.0))
    # As no encoder puts them there.
    fields = msgspec.msgpack.decode(frames[1])
    fields["prompt_embeds"] = ["float32", [1], b"\0\0\0\0"]
    with pytest.raises(ProtocolError, match="neither a frame nor a raw view"):
        codec.decode([frames[0], memoryview(bytearray(msgspec.msgpack.encode(fields)))])


def test_a_message_of_the_other_direction_is_refused() -> None:
    codec: Codec[ToWorker] = Codec(ToWorker)
    with pytest.raises(ProtocolError):
        codec.decode(views(codec.encode(Goodbye("wrong way"))))


def test_pickle_is_refused_even_if_vllm_would_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    codec: Codec[ToWorker] = Codec(ToWorker)
    params = SamplingParams(extra_args={"surprise": object()})
    with pytest.raises(ProtocolError, match="can't be sent"):
        codec.encode(Submit(R, [], params, [], []))
    pickled = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"cos\nsystem\n(S'false'\ntR."))
    with pytest.raises(ProtocolError, match="ext"):
        codec.decode(views([(1).to_bytes(4, "little"), pickled]))


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_any_frames_give_a_message_or_a_protocol_error(frames: list[bytes]) -> None:
    codec: Codec[ToWorker] = Codec(ToWorker)
    with contextlib.suppress(ProtocolError):
        codec.decode(views(list(frames)))


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_message_gives_a_message_or_a_protocol_error(place: int, byte: int) -> None:
    codec: Codec[ToWorker] = Codec(ToWorker)
    submit = Submit(R, [1, 2], SamplingParams(), [MediaPart("image", H, 0, 2, None)], [b"x"])
    frames = [bytearray(frame) for frame in codec.encode(submit)]
    frames[1][place % len(frames[1])] = byte
    with contextlib.suppress(ProtocolError):
        codec.decode(views(list(frames)))


SIZES = [
    (1,),
    (MAX_FRAME_BYTES, 0, 7),
    (MAX_FRAME_BYTES + 1, 5, 3 * MAX_FRAME_BYTES),
    (0, 5, 2 * MAX_FRAME_BYTES + 1, 2 * MAX_FRAME_BYTES, 9),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
async def test_large_frames_travel_in_pieces(sizes: tuple[int, ...]) -> None:
    sent: list[Frame] = [b"\5\0\0\0", *(bytes([n + 1]) * size for n, size in enumerate(sizes))]
    pieces = views(list(split(sent)))
    assert all(len(piece) <= MAX_FRAME_BYTES for piece in pieces)
    assert [bytes(frame) for frame in await join(pieces, 4 * MAX_FRAME_BYTES)] == sent


async def test_putting_pieces_together_lets_others_have_turns() -> None:
    pieces = 256
    head = b"\1\0\0\0" + struct.pack("<II", 2, pieces)
    joining = asyncio.ensure_future(join(views([head, b"", *[bytes(1000)] * pieces]), 1))
    turns = 0
    while not joining.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= pieces // 16
    assert len((await joining)[2]) == 1000 * pieces


async def test_tensors_of_any_shape_travel_in_pieces() -> None:
    tensor = torch.arange(MAX_FRAME_BYTES).reshape(2, -1, 4)
    *_, whole = await join(views(list(split([b"\1\0\0\0", b"", tensor.numpy().data]))), 1)
    assert torch.equal(torch.frombuffer(whole, dtype=tensor.dtype), tensor.flatten())


@pytest.mark.parametrize(
    "cuts",
    [
        [(0, 2)], [(1, 0)], [(1, 1)], [(1, 5)], [(4, 2)], [(2, 2), (1, 2)], [(1, 2), (1, 2)],
        [(1 << 31, 2)], [(1, 1 << 31)],
    ],
    ids=str,
)  # fmt: skip
async def test_pieces_that_are_not_there_are_refused(cuts: list[tuple[int, int]]) -> None:
    head = b"\1\0\0\0" + b"".join(struct.pack("<II", *cut) for cut in cuts)
    with pytest.raises(ProtocolError, match="pieces"):
        await join(views([head, b"a", b"b", b"c", b"d"]), 10)
    with pytest.raises(ProtocolError, match="a first frame of"):
        await join(views([head + b"x", b"a", b"b", b"c", b"d"]), 10)


async def test_pieces_of_too_much_beside_tensors_are_not_put_together() -> None:
    head = b"\1\0\0\0" + struct.pack("<II", 1, 2)
    with pytest.raises(ProtocolError, match="3 bytes beside its tensors"):
        await join(views([head, b"ab", b"c", b"tensor"]), 2)
    assert bytes((await join(views([head, b"ab", b"c"]), 3))[1]) == b"abc"


def test_what_a_message_that_cannot_be_read_was_about() -> None:
    codec: Codec[ToFrontend] = Codec(ToFrontend)

    def about(head: object) -> tuple[str, str]:
        frames = [memoryview((1).to_bytes(4, "little")), memoryview(msgspec.msgpack.encode(head))]
        found = codec.about(frames)
        return found.type, found.request_id

    ack = {"type": "ack", "request_id": "r", "held": 7}
    with pytest.raises(ProtocolError):
        codec.decode([memoryview(b"\1\0\0\0"), memoryview(msgspec.msgpack.encode(ack))])
    assert about(ack) == ("ack", "r")
    assert about({"type": "failed", "request_id": "r"}) == ("failed", "r")
    heads: list[object] = [[], 7, {"type": 7}, {"request_id": None}]
    for strange in heads:
        assert about(strange) == ("", "")
    for frames in ([], [b""], [b"\1\0\0\0", b"\xc1"], [b"", b"\x91" * 5_000], [b"", b"\xa1\xff"]):
        assert codec.about([memoryview(frame) for frame in frames]).request_id == ""


@pytest.mark.parametrize("text", ["half a letter \ud83d", 2**70])
def test_what_has_no_encoding_is_refused(text: object) -> None:
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    with pytest.raises(ProtocolError, match="Goodbye can't be sent"):
        codec.encode(Goodbye(text))  # type: ignore[arg-type]
    assert codec.encode(Goodbye("fine"))


def test_a_large_message_is_not_looked_through_by_the_collector() -> None:
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    many = [{token: Logprob(-1.0) for token in range(20)} for _ in range(1_000)]
    output = Output(R, [], finished=False, prompt_logprobs=[None, *many])
    frames = views(list(codec.encode(Outputs([output]))))
    collections: list[object] = []
    gc.collect()
    gc.callbacks.append(lambda *told: collections.append(told))
    try:
        message, _ = codec.decode(frames)
        during = len(collections)
    finally:
        gc.callbacks.pop()
    assert isinstance(message, Outputs) and gc.isenabled()
    assert during <= 2, "one at its end, which begins and ends"
    with pytest.raises(ProtocolError):
        codec.decode([frames[0], memoryview(b"\xc1" * (1 << 20))])
    assert gc.isenabled()

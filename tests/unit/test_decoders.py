"""Every decoder against anybody's bytes: its own typed errors come out, and nothing else.

Noise is refused at the first byte, so most inputs here are valid messages with a byte
changed, a frame lost, or a field that is of the right type and cannot be.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams

from common.card import WorkerCard
from common.errors import CardError, CorruptSegmentError, MmRouterError, ProtocolError
from common.fleet_sockets import check_card
from common.identity import Incarnation, MmHash, RequestId, WorkerId
from common.protocol import (
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
    Ping,
    Status,
    Submit,
    Supply,
    ToFrontend,
    ToWorker,
    Welcome,
)
from common.transfer.arena_layout import ArenaOffer
from common.transfer.handshake import TransferOffer, TransferReply, parse_offer, parse_reply
from common.transfer.inline import InlineReceiver
from common.transfer.metadata import (
    InlineMetadata,
    NixlMetadata,
    ReferenceMetadata,
    ShmMetadata,
    decode_metadata,
    encode_metadata,
)
from common.transfer.nixl_offer import NixlOffer
from common.wire import Codec, Frame
from frontend.fetch.data_url import read_data_url
from frontend.media_limits.errors import MediaError
from frontend.media_limits.policy import FetchPolicy, parse_url
from frontend.router.event_wire import MalformedEventError, decode_batch, decode_sequence
from tests.unit.common.cards import make_card
from tests.unit.frontend.router.kv_events import cleared, encode, removed, stored

R = RequestId("r")
H = MmHash("ab" * 32)
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ITEM: dict[str, Any] = {"mm_hash": H, "envelope_size": 10, "buffer_sizes": (5, 0)}
ARENA = ArenaOffer(
    name="mmrouter-arena-1-2-" + "0" * 16, size=1 << 20, generation=3, nonce="0" * 64
)
OFFER = TransferOffer(
    shm=ARENA,
    nixl=NixlOffer(agent="f", metadata="AAAA", address=4096, arena=ARENA, checksum_key="ab" * 32),
)

TO_WORKER: list[msgspec.Struct] = [
    Hello(1, Incarnation("f"), OFFER.model_dump_json().encode()),
    Submit(
        R,
        [1, 2, 3],
        SamplingParams(n=2, stop=["a"], seed=7, logprobs=3),
        [MediaPart("image", H, 0, 2, b"\x01\x00")],
        [encode_metadata(InlineMetadata(**ITEM))],
        prompt_embeds=torch.zeros(32, 128),
        cache_salt="salt",
    ),
    Supply(R, [b"{}"]),
    Abort(R),
    Ping(),
    Leave(),
]
TO_FRONTEND: list[msgspec.Struct] = [
    Welcome(1, WorkerId("w"), Incarnation("i"), TransferReply(shm=True).model_dump_json().encode()),
    Goodbye("why"),
    Ack(R, [H]),
    Nack(R, [H], "not_held"),
    Output(
        R,
        [CompletionOutput(0, "x", [1], 0.5, [{1: Logprob(0.5, 1, "x")}], finish_reason="stop")],
        finished=True,
    ),
    Failed(R, FailureKind.MEDIA, "why"),
    Status(1, 2, 3, 0.5, 6),
]


def frames_of(message: msgspec.Struct, side: Any) -> list[bytes]:
    codec: Codec[Any] = Codec(side)
    return [bytes(frame) for frame in codec.encode(message, [b"media"])]


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


@dataclass(frozen=True)
class Side:
    """One direction of the request plane."""

    type: Any
    originals: list[list[bytes]]

    def decode(self, frames: Sequence[Frame]) -> None:
        codec: Codec[msgspec.Struct] = Codec(self.type)
        # ZeroMQ's frames are writable memory of their own.
        message, media = codec.decode([memoryview(bytearray(frame)) for frame in frames])
        assert isinstance(message, msgspec.Struct)
        assert len(media) < len(frames)


TO_WORKER_SIDE = Side(ToWorker, [frames_of(message, ToWorker) for message in TO_WORKER])
TO_FRONTEND_SIDE = Side(ToFrontend, [frames_of(message, ToFrontend) for message in TO_FRONTEND])
SIDES = pytest.mark.parametrize(
    "side", [TO_WORKER_SIDE, TO_FRONTEND_SIDE], ids=["to worker", "to frontend"]
)


def survives(
    work: Callable[[], object], *expected: type[Exception], longest: int = 100_000
) -> None:
    """Run a decoder: an expected error or none. What it says stays short."""
    try:
        work()
    except expected as error:
        assert len(str(error)) < longest


@SIDES
@given(st.data())
@FUZZ
def test_damaged_messages(side: Side, data: st.DataObject) -> None:
    frames = data.draw(damaged_frames(side.originals) | st.lists(st.binary(max_size=64)))
    survives(lambda: side.decode(frames), ProtocolError)


@SIDES
@given(st.data())
@FUZZ
def test_messages_with_a_value_that_cannot_be(side: Side, data: st.DataObject) -> None:
    frames = data.draw(hostile_frames(side.originals))
    survives(lambda: side.decode(frames), ProtocolError)


METADATA = [
    encode_metadata(each)
    for each in (
        ShmMetadata(arena="a", offset=4096, generation=3, **ITEM),
        NixlMetadata(agent="f", offset=4096, generation=3, checksum="ab" * 16, **ITEM),
        InlineMetadata(**ITEM),
        ReferenceMetadata(
            modality="image", mm_processor_kwargs={"a": [1]}, media_io_kwargs={}, **ITEM
        ),
    )
]


@given(damaged_bytes(METADATA) | hostile_json(METADATA))
@FUZZ
def test_transfer_metadata(content: bytes) -> None:
    survives(lambda: decode_metadata(content), CorruptSegmentError)


@given(st.data())
@FUZZ
async def test_inline_items(data: st.DataObject) -> None:
    metadata = InlineMetadata(
        mm_hash=H,
        envelope_size=data.draw(st.integers(0, 2**63 - 1)),
        buffer_sizes=tuple(data.draw(st.lists(st.integers(0, 2**63 - 1), max_size=3))),
        first_frame=data.draw(st.integers(0, 5) | st.integers(0, 2**63 - 1)),
    )
    frames = [memoryview(bytearray(each)) for each in data.draw(st.lists(st.binary(), max_size=5))]
    receiver = InlineReceiver()
    with pytest.raises(CorruptSegmentError):
        await receiver.receive(metadata, frames)
    await receiver.close()


OFFERS = [OFFER.model_dump_json().encode(), TransferOffer(shm=ARENA).model_dump_json().encode()]
REPLIES = [TransferReply(nixl="f", refusals=("no",)).model_dump_json().encode()]


@given(damaged_bytes(OFFERS) | hostile_json(OFFERS))
@FUZZ
def test_transfer_offers(content: bytes) -> None:
    def decode() -> None:
        offer = parse_offer(content)
        for arena in (offer.shm, offer.nixl.arena if offer.nixl else None):
            # A name, never a path: it is looked up in the shared-memory directory.
            assert arena is None or "/" not in arena.name

    survives(decode, ProtocolError)


@given(damaged_bytes(REPLIES) | hostile_json(REPLIES))
@FUZZ
def test_transfer_replies(content: bytes) -> None:
    survives(lambda: parse_reply(content), ProtocolError)


CARDS = [make_card().to_json()]


@given(damaged_bytes(CARDS) | hostile_json(CARDS))
@FUZZ
def test_cards(content: bytes) -> None:
    def decode() -> None:
        check_card(WorkerCard.from_json(content), None)

    survives(decode, CardError)


EVENTS = [
    encode([stored(1, 2), removed(1), cleared()]),
    encode([stored(3, extra_keys=None, kv_cache_spec_kind="sliding_window")]),
]


@st.composite
def hostile_events(draw: st.DrawFn) -> bytes:
    value = msgspec.msgpack.decode(draw(st.sampled_from(EVENTS)))
    return msgspec.msgpack.encode(replaced(draw, value, VALUES))


@given(damaged_bytes(EVENTS) | hostile_events())
@FUZZ
def test_events(content: bytes) -> None:
    survives(lambda: decode_batch(content), MalformedEventError)


@given(st.binary(max_size=20))
def test_sequence_numbers(content: bytes) -> None:
    survives(lambda: decode_sequence(content), MalformedEventError)


URLS = st.builds(
    "".join,
    st.lists(
        st.sampled_from(
            ["http", "https", "file", "data", "://", ":", "/", "//", "@", "[", "]", "::1", "%00",
             "?", "#", "..", "127.0.0.1", "0x7f.1", "2130706433", "example.com", "user:pass", "\\",
             "\n", "é", "xn--", ":99999", ":0", ",", ";base64"]
        )
        | st.text(max_size=4),
        max_size=8,
    ),
)  # fmt: skip


@given(URLS)
@FUZZ
def test_urls(url: str) -> None:
    policy = FetchPolicy()

    def check() -> None:
        policy.check_url(parse_url(url))

    survives(check, MediaError, longest=300)


@given(URLS, URLS)
@FUZZ
def test_redirects(url: str, location: str) -> None:
    policy = FetchPolicy()
    survives(lambda: policy.redirect(parse_url(url), location), MediaError, longest=300)


@given(damaged_bytes([b"data:image/png;base64,iVBORw0KGgo=", b"data:video/jpeg;base64,/9j/,/9j/"]))
@FUZZ
def test_data_urls(content: bytes) -> None:
    def read() -> None:
        found = read_data_url(content.decode("latin-1"), 20, jpeg_frames=True)
        assert len(found.data) <= 30

    # vLLM turns a ValueError into an answer of 400.
    survives(read, MediaError, ValueError)


def test_every_expected_error_is_one_of_ours() -> None:
    for error in (ProtocolError, CorruptSegmentError, CardError, MalformedEventError, MediaError):
        assert issubclass(error, MmRouterError)

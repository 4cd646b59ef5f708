"""Every decoder against anybody's bytes: its own typed errors come out, and nothing else.

Noise is refused at the first byte, so most inputs here are valid messages with a byte
changed, a frame lost, or a field that is of the right type and cannot be.
"""

import socket
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.errors import CardError, CorruptSegmentError, MmRouterError, ProtocolError
from common.request_plane.card import WorkerCard
from common.request_plane.fleet_sockets import check_card
from common.transfer.handshake import TransferOffer, TransferReply, parse_offer, parse_reply
from common.transfer.inline import InlineReceiver
from common.transfer.metadata import (
    MAX_ENVELOPE_BYTES,
    InlineMetadata,
    NixlMetadata,
    ReferenceMetadata,
    ShmMetadata,
    decode_metadata,
    encode_metadata,
)
from common.transfer.nixl_processes.messages import (
    Channel,
    Done,
    FromReader,
    FromServer,
    NixlFailed,
    NixlPong,
    Reading,
    Serving,
    Unusable,
)
from frontend.fetch.data_url import read_data_url
from frontend.media_limits.policy import FetchPolicy, MediaError, parse_url
from frontend.router.event_wire import MalformedEventError, decode_batch, decode_sequence
from tests.fakes.cards import make_card
from tests.fakes.damage import (
    VALUES,
    damaged_bytes,
    damaged_frames,
    hostile_frames,
    hostile_json,
    replaced,
)
from tests.fakes.kv_events import cleared, encode, removed, stored
from tests.fakes.messages import ARENA, ITEM, OFFER, TO_FRONTEND_SIDE, TO_WORKER_SIDE, H, Side

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
        envelope_size=data.draw(st.integers(0, MAX_ENVELOPE_BYTES)),
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


NIXL_MESSAGES = [
    msgspec.msgpack.encode(message)
    for message in (
        Serving("f", b"metadata", 4096),
        Reading(),
        Unusable("why"),
        Done(1),
        NixlFailed(1, "why"),
        NixlPong(),
    )
]
DEEP = b"\x91" * 10_000 + b"\xc0"
"""An array in an array, and so on."""


@given(
    st.sampled_from([FromReader, FromServer]),
    damaged_bytes(NIXL_MESSAGES) | st.binary(max_size=64),
)
@example(FromReader, NIXL_MESSAGES[4].replace(b"why", b"wh\xff"))
@example(FromReader, b"\x82\xa4type\xa4pong\xa1x" + DEEP)
@FUZZ
def test_messages_of_processes_that_hold_a_nixl_agent(incoming: object, content: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        channel: Channel[object, object] = Channel(ours, incoming)
        theirs.send(content)
        survives(channel.receive, msgspec.MsgspecError, EOFError)


def test_a_process_that_serves_says_no_more_than_an_offer_takes() -> None:
    said = msgspec.msgpack.decode(NIXL_MESSAGES[0])
    decode = msgspec.msgpack.Decoder(FromServer).decode
    assert decode(msgspec.msgpack.encode(said))
    for bad in ({"agent": ""}, {"agent": "x" * 256}, {"metadata": bytes(100_000)}, {"address": 0}):
        with pytest.raises(msgspec.ValidationError):
            decode(msgspec.msgpack.encode(said | bad))


EVENTS = [
    encode([stored(1, 2), removed(1), cleared()]),
    encode([stored(3, extra_keys=None, kv_cache_spec_kind="sliding_window")]),
]


@st.composite
def hostile_events(draw: st.DrawFn) -> bytes:
    value = msgspec.msgpack.decode(draw(st.sampled_from(EVENTS)))
    return msgspec.msgpack.encode(replaced(draw, value, VALUES))


@given(damaged_bytes(EVENTS) | hostile_events())
@example(b"\x94" + EVENTS[0][1:] + DEEP)
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

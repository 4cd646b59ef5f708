import pytest
from vllm.multimodal.inputs import MultiModalKwargsItem

from common.errors import CorruptSegmentError, NoEncodedFormError
from common.identity import MmHash
from common.observability.telemetry import TRANSFER_FALLBACKS
from common.transfer.base import MediaSource
from common.transfer.inline import InlineSender, ReferenceReceiver, ReferenceSender
from common.transfer.metadata import decode_metadata, encode_metadata
from common.transfer.transports import SenderSet, TransferMode, choose_transport
from tests.unit.common.transfer.items import image, image_hash, is_image

CAT = MediaSource("image", b"\x89PNG", {"min_pixels": 1}, {"backend": "x"})


class Renderer:
    """Turns everything into one image."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.seen: list[MediaSource] = []

    async def __call__(self, source: MediaSource) -> tuple[MmHash, MultiModalKwargsItem]:
        self.seen.append(source)
        return image_hash(self.seed), image(self.seed)


async def test_the_worker_processes_what_the_user_sent() -> None:
    renderer = Renderer(1)
    handle = ReferenceSender().send_encoded(image_hash(1), CAT)
    metadata = decode_metadata(encode_metadata(handle.metadata))
    frames = [memoryview(frame) for frame in handle.frames]
    with await ReferenceReceiver(renderer).receive(metadata, frames) as received:
        assert is_image(received.item, 1)
    assert renderer.seen == [CAT]


async def test_what_becomes_something_else_there_is_refused() -> None:
    handle = ReferenceSender().send_encoded(image_hash(1), CAT)
    frames = [memoryview(frame) for frame in handle.frames]
    with pytest.raises(CorruptSegmentError, match="when processed here"):
        await ReferenceReceiver(Renderer(2)).receive(handle.metadata, frames)
    with pytest.raises(CorruptSegmentError, match="without its frame"):
        await ReferenceReceiver(Renderer(1)).receive(handle.metadata, [])


def test_what_has_no_encoded_form_goes_as_tensors_and_is_counted() -> None:
    with pytest.raises(NoEncodedFormError):
        ReferenceSender().send(image_hash(1), image(1))
    senders = SenderSet([InlineSender(), ReferenceSender()])
    choice = choose_transport(TransferMode.DISABLED, [])
    counted = TRANSFER_FALLBACKS.labels("reference", "no_encoded_form")._value
    before = counted.get()
    assert senders.send_held(choice, image_hash(1)) is None
    assert senders.send(choice, image_hash(1), image(1)).metadata.transport == "inline"
    assert counted.get() == before + 1
    held = senders.send_held(choice, image_hash(1), CAT)
    assert held is not None and held.metadata.transport == "reference"

"""Sender and receiver interfaces of every transport.

They own what transports share: the stage (metric, NVTX range, log), the byte count, and one
received item per turn of the event loop. Each transport has a file of its own.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

from pydantic import JsonValue
from vllm.multimodal.inputs import MultiModalKwargsItem

from common.aio.cleanup import Released
from common.errors import CorruptSegmentError
from common.identity import MmHash
from common.media.cache_partition import SHARED, Partition
from common.observability.telemetry import TENSOR_BYTES_RECEIVED, stage
from common.transfer.arena import Buffer
from common.transfer.handshake import TransferOffer, TransferReply
from common.transfer.metadata import FramedMetadata, ItemMetadata, TransferMetadata, Transport


class Attachment:
    """One session's hold on a frontend's memory. A frontend may have two sessions for a while: the
    end of one must not affect the other."""

    def __init__(self, let_go: Callable[[], None] = lambda: None) -> None:
        self._let_go: Callable[[], None] | None = let_go

    def detach(self) -> None:
        """Release this hold; received items stay usable. Later calls do nothing."""
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


class Attachments:
    """Counts holds by name. For one event loop."""

    def __init__(self, let_go: Callable[[str], None]) -> None:
        self._let_go = let_go  # gets a name whose last hold was given up
        self._holds: Counter[str] = Counter()

    def add(self, name: str) -> Attachment:
        self._holds[name] += 1
        return Attachment(lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        self._holds[name] -= 1
        if not self._holds[name]:
            del self._holds[name]
            self._let_go(name)


@dataclass(frozen=True)
class MediaSource:
    """A medium before processing.

    Attributes:
        modality: vLLM's name.
        encoded: the file as fetched, a JPEG for example.
        mm_processor_kwargs: the request's options for the HF processor.
        media_io_kwargs: the request's options for the decoder.
    """

    modality: str
    encoded: bytes
    mm_processor_kwargs: dict[str, JsonValue]
    media_io_kwargs: dict[str, JsonValue]
    partition: Partition = SHARED


_Metadata = TypeVar("_Metadata", bound=ItemMetadata)


def _nothing() -> None:
    pass


class Turns:
    """Let one caller through per turn of the event loop, which a burst would block."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def mine(self) -> None:
        """Return at once if no caller did in this turn; else wait for a later one."""
        await self._lock.acquire()
        asyncio.get_running_loop().call_soon(self._lock.release)


class MediaHandle(Released):
    """An item available to a worker until :meth:`release`. ``frames`` go with the metadata of an
    inline item, and alias the processor's tensors."""

    def __init__(
        self,
        metadata: TransferMetadata,
        frames: Sequence[Buffer] = (),
        on_release: Callable[[], None] = _nothing,
    ) -> None:
        self.metadata = metadata
        self.frames = frames
        self._on_release = on_release

    def release(self) -> None:
        """Take the item back. Later calls do nothing. A late worker gets a StaleSegmentError."""
        on_release, self._on_release = self._on_release, _nothing
        self.frames = ()
        on_release()


class Received(Released):
    """An item on the worker's side, until :meth:`release`.

    Attributes:
        item: tensors, perhaps in another process's memory: not to be used once released.
        checked: bytes that :meth:`release` checks for written pages, at about 16 us per MB.
    """

    def __init__(
        self,
        mm_hash: MmHash,
        item: MultiModalKwargsItem,
        *,
        verify: Callable[[], None] = _nothing,
        on_release: Callable[[], None] = _nothing,
        checked: int = 0,
    ) -> None:
        self.mm_hash = mm_hash
        self.item = item
        self.checked = checked
        self._verify = verify
        self._on_release = on_release

    def verify(self) -> None:
        """Check that the tensors were still the item's when the engine took them. Raises
        StaleSegmentError: a frontend overwrote them before the ack; the request must fail."""
        self._verify()

    def release(self) -> None:
        """Release the memory, from any thread. Later calls do nothing."""
        on_release, self._on_release = self._on_release, _nothing
        self._verify = _nothing
        self.item = MultiModalKwargsItem({})
        on_release()


class Accepted(NamedTuple):
    """A worker has read the probe: its reply, and the session's hold on the frontend's memory."""

    reply: TransferReply
    attachment: Attachment


class MmKwargsSender(ABC):
    """The frontend's end of a transport. ``on_change`` is called, in any thread, for a new
    offer."""

    transport: ClassVar[Transport]

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = _nothing

    @property
    def offers(self) -> bool:
        """Whether it could be offered to a worker now."""
        return True

    def send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        """Make an item available to any worker that gets the handle's metadata.

        May copy the whole item: call it in a thread. Thread-safe.

        Raises:
            ArenaFullError: no room for it; send it inline.
            ArenaUnavailableError: the transport was closed.
            NoEncodedFormError: this transport carries no tensors.
            UnsupportedItemError: no transport can send the item.
        """
        with stage(f"send_{self.transport}"):
            return self._send(mm_hash, item)

    def send_held(self, mm_hash: MmHash) -> MediaHandle | None:
        """Send an item this transport still has, or return None. Never copies nor waits."""
        return None

    def send_encoded(self, mm_hash: MmHash, source: MediaSource) -> MediaHandle | None:
        """Send the encoded file, on the event loop; None if this transport carries tensors."""
        return None

    def add_offer(self, offer: TransferOffer) -> TransferOffer:
        """Add this transport's present offer, if workers have to prove it."""
        return offer

    def proven(self, reply: TransferReply) -> bool:
        """Return whether a worker's reply proves that it has read the present probe."""
        return False

    @abstractmethod
    def _send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        """Implement :meth:`send`, raising the same. After an error nothing is held."""

    def close(self) -> None:  # noqa: B027  # some hold nothing
        """Release all resources. Present handles become stale for their readers."""


class MmKwargsReceiver(ABC, Generic[_Metadata]):
    """The worker's end of a transport."""

    transport: ClassVar[Transport]
    metadata_type: type[_Metadata]

    def __init__(self) -> None:
        self._turns = Turns()

    def add_prospects(self, reply: TransferReply) -> TransferReply:
        """Add what this transport knows before an offer: the location of both processes."""
        return reply

    def obstacle(self, reply: TransferReply) -> str:
        """Return why this transport can't work, given :meth:`add_prospects`; empty if it may."""
        return ""

    async def accept(self, offer: TransferOffer, reply: TransferReply) -> Accepted | None:
        """Try a frontend's offer of this transport; None if there is none. Cancelling leaves
        nothing behind. Raises TransferError, ConfigurationError: it can't be used here."""
        return None

    async def receive(
        self, metadata: TransferMetadata, frames: Sequence[memoryview] = ()
    ) -> Received:
        """Receive an item. ``frames`` are all frames of the message with the metadata.

        Cancelling leaves nothing behind: the item's memory is freed at once, or when an unstoppable
        read has ended.

        Raises:
            ArenaUnavailableError: the frontend's memory isn't mapped or connected here.
            StaleSegmentError: the handle was released; ask the frontend for the item again.
            CorruptSegmentError: the bytes do not match the metadata.
            TransferTimeoutError: the bytes did not come in time.
            ArenaFullError: there is no memory for it here.
        """
        await self._turns.mine()
        with stage(f"receive_{self.transport}"):
            if not isinstance(metadata, self.metadata_type):
                raise CorruptSegmentError(
                    f"the {self.transport} transport can't receive what {metadata.transport} sent"
                )
            received = await self._receive(metadata, frames)
        TENSOR_BYTES_RECEIVED.labels(self.transport).inc(metadata.nbytes)
        return received

    @abstractmethod
    async def _receive(self, metadata: _Metadata, frames: Sequence[memoryview]) -> Received:
        """Implement :meth:`receive`, with the same errors and cancellation rule."""

    async def close(self) -> None:  # some have no peers
        """Disconnect all peers. Received items stay usable until released. Cancelling may leave
        memory mapped until the process ends."""


def join_frames(handles: Sequence[MediaHandle]) -> tuple[list[TransferMetadata], list[Buffer]]:
    """Concatenate handles' frames; return their metadata, with new indices, and all frames."""
    metadata: list[TransferMetadata] = []
    frames: list[Buffer] = []
    for handle in handles:
        each = handle.metadata
        if isinstance(each, FramedMetadata):
            each = each.model_copy(update={"first_frame": len(frames)})
        metadata.append(each)
        frames.extend(handle.frames)
    return metadata, frames

"""The two interfaces of every transport, and what they hand out.

They own what all transports share: the stage (metric, NVTX range, log), the count of bytes,
and that items are received one per turn of the event loop. How bytes move stands in one file
per transport.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

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
    """One session's hold on the memory of a frontend, which may have two for a while: what the old
    one gives up must not be taken from the new one."""

    def __init__(self, let_go: Callable[[], None] = lambda: None) -> None:
        self._let_go: Callable[[], None] | None = let_go

    def detach(self) -> None:
        """Give up this hold; items that were received stay usable. Later calls do nothing."""
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


class Attachments:
    """Counts the holds on what has a name. For one event loop."""

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
        modality: vLLM's name of it.
        encoded: the file as fetched, a JPEG for example.
        mm_processor_kwargs: what the request told the HF processor.
        media_io_kwargs: what the request told the decoder.
        partition: whose it is.
    """

    modality: str
    encoded: bytes
    mm_processor_kwargs: dict[str, JsonValue]
    media_io_kwargs: dict[str, JsonValue]
    partition: Partition = SHARED


SentHook: TypeAlias = Callable[[Transport, int], None]
"""Called with the transport and the bytes of each item that is sent."""

_Metadata = TypeVar("_Metadata", bound=ItemMetadata)


def _nothing() -> None:
    pass


class Turns:
    """Lets one caller through per turn of the event loop, so that a burst of items does not hold
    it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def mine(self) -> None:
        """Return at once if nobody did in this turn; else wait for a later one."""
        await self._lock.acquire()
        asyncio.get_running_loop().call_soon(self._lock.release)


class MediaHandle(Released):
    """An item made available to a worker, until :meth:`release`.

    Attributes:
        metadata: goes to the worker.
        frames: go with it on the request plane; empty unless the item rides inline. They
            alias the processor's tensors, not copies.
    """

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
        """Take the item back. Later calls do nothing. A worker that comes later gets a
        StaleSegmentError, never another item's bytes."""
        on_release, self._on_release = self._on_release, _nothing
        self.frames = ()
        on_release()


class Received(Released):
    """An item on the worker's side, until :meth:`release`.

    Attributes:
        mm_hash: its hash.
        item: its tensors, perhaps in memory of another process: not to be used once released.
        checked: bytes that :meth:`release` looks through for pages that were written to, at
            about 16 us per MB.
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
        """Check that the tensors were still the item's when the engine took them.

        Raises StaleSegmentError: they were overwritten, by a frontend that did not wait for the
        ack; the request must not go on.
        """
        self._verify()

    def release(self) -> None:
        """Give the memory back, from any thread. The second and later calls do nothing."""
        on_release, self._on_release = self._on_release, _nothing
        self._verify = _nothing
        self.item = MultiModalKwargsItem({})
        on_release()


class Accepted(NamedTuple):
    """A worker can use what a frontend offered: it has read the probe.

    Attributes:
        reply: the answer, with what this transport says.
        attachment: the session's hold on the frontend's memory.
    """

    reply: TransferReply
    attachment: Attachment


class MmKwargsSender(ABC):
    """The frontend's end of a transport.

    Attributes:
        on_change: called, perhaps in a thread, when what it offers has changed.
    """

    transport: ClassVar[Transport]

    def __init__(self, *, on_sent: SentHook | None = None) -> None:
        self._on_sent = on_sent
        self.on_change: Callable[[], None] = _nothing

    @property
    def offers(self) -> bool:
        """Whether it could be offered to a worker now."""
        return True

    def send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        """Make an item available to any worker that is given the handle's metadata.

        May copy the whole item: call it in a thread. Any number of threads may.

        Raises:
            ArenaFullError: no room for it; send it inline.
            ArenaUnavailableError: the transport was closed.
            NoEncodedFormError: this transport carries no tensors.
            UnsupportedItemError: the item can't be sent by any transport.
        """
        with stage(f"send_{self.transport}"):
            handle = self._send(mm_hash, item)
        self.count_sent(handle)
        return handle

    def send_held(self, mm_hash: MmHash) -> MediaHandle | None:
        """Like :meth:`send` for an item that this transport still has: never copies, never
        waits, so it may be called on the event loop. None if it doesn't have it."""
        handle = self._send_held(mm_hash)
        if handle is not None:
            self.count_sent(handle)
        return handle

    def send_encoded(self, mm_hash: MmHash, source: MediaSource) -> MediaHandle | None:
        """Send a medium as its user sent it, on the event loop; None if this transport carries
        tensors."""
        return None

    def add_offer(self, offer: TransferOffer) -> TransferOffer:
        """The offer with what this transport offers now, if workers have to prove it."""
        return offer

    def proven(self, reply: TransferReply) -> bool:
        """Whether a worker's answer says that it has read the probe as it is now."""
        return False

    def count_sent(self, handle: MediaHandle) -> None:
        if self._on_sent is not None:
            self._on_sent(self.transport, handle.metadata.nbytes)

    @abstractmethod
    def _send(self, mm_hash: MmHash, item: MultiModalKwargsItem) -> MediaHandle:
        """What :meth:`send` does, raising the same. After an error nothing is held."""

    def _send_held(self, mm_hash: MmHash) -> MediaHandle | None:
        """What :meth:`send_held` does. A transport that keeps nothing gives None."""
        return None

    def close(self) -> None:  # noqa: B027  # some hold nothing
        """Free what the transport holds. Handles that are out go stale for their readers."""


class MmKwargsReceiver(ABC, Generic[_Metadata]):
    """The worker's end of a transport."""

    transport: ClassVar[Transport]
    metadata_type: type[_Metadata]

    def __init__(self) -> None:
        self._turns = Turns()

    def add_prospects(self, reply: TransferReply) -> TransferReply:
        """The answer with what this transport says before it was offered: from where the two
        processes are."""
        return reply

    def obstacle(self, reply: TransferReply) -> str:
        """Why it leads nowhere, in a sentence, given :meth:`add_prospects`; empty if it may."""
        return ""

    async def accept(self, offer: TransferOffer, reply: TransferReply) -> Accepted | None:
        """Try what a frontend offers of this transport; None if it offers nothing.

        Cancelling it leaves nothing behind.

        Raises:
            TransferError: it can't be used here; another transport may.
            ConfigurationError: likewise.
        """
        return None

    async def receive(
        self, metadata: TransferMetadata, frames: Sequence[memoryview] = ()
    ) -> Received:
        """Get an item.

        Args:
            metadata: from the frontend's handle.
            frames: all frames of the message that carried the metadata.

        Raises:
            ArenaUnavailableError: the frontend's memory isn't mapped or connected here.
            StaleSegmentError: the handle was released; ask the frontend for the item again.
            CorruptSegmentError: the bytes are not what the metadata promises.
            TransferTimeoutError: the bytes did not come in time.
            ArenaFullError: there is no memory for it here.

        Cancelling it leaves nothing behind: memory taken for the item is given back, at
        once or when a read that can't be stopped has ended.
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
        """What :meth:`receive` does, raising the same and under the same cancellation rule."""

    async def close(self) -> None:  # some have none
        """Let go of all peers. Items that were received stay usable until released.

        Cancelling it may leave memory mapped until the process ends.
        """


def join_frames(handles: Sequence[MediaHandle]) -> tuple[list[TransferMetadata], list[Buffer]]:
    """Put the frames of several handles behind each other, in one message.

    Returns:
        Their metadata, those with frames pointing at where their frames came to lie, and all
        frames.
    """
    metadata: list[TransferMetadata] = []
    frames: list[Buffer] = []
    for handle in handles:
        each = handle.metadata
        if isinstance(each, FramedMetadata):
            each = each.model_copy(update={"first_frame": len(frames)})
        metadata.append(each)
        frames.extend(handle.frames)
    return metadata, frames

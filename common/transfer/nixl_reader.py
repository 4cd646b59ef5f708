"""What a worker does with its NIXL agent: tasks for the thread that owns it."""

from common.transfer.arena_layout import HEAD_SIZE, check_head
from common.transfer.base import Received
from common.transfer.codec import decode
from common.transfer.metadata import NixlMetadata
from common.transfer.nixl_agent import NixlOffer, NixlRead
from common.transfer.nixl_buffers import ReadBuffer, ReadBuffers
from common.transfer.nixl_thread import NixlThread, Steps
from common.transfer.segment import HEADER_SIZE, check_envelope, check_header


class NixlReader:
    """Connects to frontends and reads segments of their arenas.

    Attributes:
        thread: runs what the methods here give.
        buffers: where segments go.
    """

    def __init__(self, slots: int, slot_size: int) -> None:
        """Make agent and pool: about half a second.

        Args:
            slots: of the pool.
            slot_size: bytes of each.

        Raises:
            ConfigurationError: NIXL can't be used here.
            ArenaUnavailableError: the pool can't be registered.
        """
        self.thread = NixlThread("worker")
        self.buffers = self.thread.run(self._make_buffers(slots, slot_size))

    def _make_buffers(self, slots: int, slot_size: int) -> Steps[ReadBuffers]:
        buffers = ReadBuffers(self.thread.agent, slots, slot_size)
        yield
        return buffers

    def connect(self, offer: NixlOffer) -> Steps[None]:
        """Connect to a frontend and check that it is the one."""
        agent = self.thread.agent
        agent.connect(offer.unpack_metadata())
        try:
            yield from self.check(offer)
        except Exception:
            agent.disconnect(offer.agent)
            raise

    def check(self, offer: NixlOffer) -> Steps[None]:
        """Read the probe of a connected frontend's arena."""
        buffer = self.buffers.take(HEAD_SIZE)
        try:
            yield from _copied(
                self.thread.agent.read(
                    offer.agent, buffer.segment_address, offer.address, HEAD_SIZE
                )
            )
            check_head(buffer.segment, offer.arena)
        except Exception:
            # No error comes from above while a transfer is under way.
            self.buffers.give_back(buffer)
            raise
        self.buffers.give_back(buffer)

    def read(self, offer: NixlOffer, metadata: NixlMetadata) -> Steps[Received]:
        """Read a segment and build the item over it."""
        agent, layout = self.thread.agent, metadata.layout
        source = offer.address + metadata.offset
        buffer = self.buffers.take(layout.length)
        try:
            yield from _copied(
                agent.read(offer.agent, buffer.segment_address, source, layout.length)
            )
            # The header once more, and this one counts: it is overwritten before the bytes
            # behind it are, so if it is valid now, they were the item's when they came.
            yield from _copied(agent.read(offer.agent, buffer.spare_address, source, HEADER_SIZE))
            crc = check_header(
                buffer.spare, offer.arena.key, metadata.generation, metadata.mm_hash, layout
            )
            envelope, parts = layout.split(buffer.segment)
            check_envelope(envelope, crc, metadata.mm_hash)
            item = decode(envelope, parts)
        except Exception:
            self.buffers.give_back(buffer)  # as above
            raise
        return Received(metadata.mm_hash, item, on_release=lambda: self._release(buffer))

    def disconnect(self, name: str) -> Steps[None]:
        """Forget a frontend that nothing is read from any more."""
        self.thread.agent.disconnect(name)
        yield

    def _release(self, buffer: ReadBuffer) -> None:
        """Give a buffer back from any thread."""
        if buffer.registration is None:
            self.buffers.give_back(buffer)
        else:
            self.thread.start(self._deregister(buffer))

    def _deregister(self, buffer: ReadBuffer) -> Steps[None]:
        self.buffers.give_back(buffer)
        yield


def _copied(read: NixlRead) -> Steps[None]:
    while not read.poll():
        yield

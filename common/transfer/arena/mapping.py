"""An arena as another process sees it: mapped and checked. Workers never write to it; the
frontend's own helpers may.
"""

import mmap
import os
import stat
from pathlib import Path

from common.errors import ArenaUnavailableError, CorruptSegmentError
from common.transfer import pages
from common.transfer.arena.file import SHARED_MEMORY
from common.transfer.arena.layout import SEGMENTS_START, ArenaOffer, check_head
from common.transfer.arena.segment_table import SEGMENT_ALIGNMENT


class ArenaMapping:
    """Memory of one arena, private on write unless it is opened writable.

    It stays mapped until the last view of it is gone, whatever becomes of the owner.
    """

    def __init__(self, offer: ArenaOffer, memory: memoryview) -> None:
        """Take over mapped memory; use :meth:`open`."""
        self.offer = offer
        self.memory = memory

    @classmethod
    def open(
        cls, offer: ArenaOffer, directory: Path = SHARED_MEMORY, *, writable: bool = False
    ) -> "ArenaMapping":
        """Map an arena and prove that it is the one offered.

        Args:
            directory: where shared memory is mounted.
            writable: what is written here is seen by everybody; else by nobody.

        Raises:
            ArenaUnavailableError: it can't be read here, or is somebody else's.
        """
        path = directory / offer.name
        try:
            mode = os.O_RDWR if writable else os.O_RDONLY
            descriptor = os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaUnavailableError(f"can't open the arena {path}: {error}") from error
        try:
            _check_file(descriptor, offer)
            # Private rather than read-only: torch wants writable memory, and a stray write
            # should cost a page, not the process.
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
            memory = memoryview(mmap.mmap(descriptor, offer.size, access=access))
        except (OSError, ValueError) as error:
            raise ArenaUnavailableError(f"can't map the arena {path}: {error}") from error
        finally:
            os.close(descriptor)
        check_head(memory, offer)
        return cls(offer, memory)

    def prefault(self) -> None:
        """Map all pages now. For a thread: takes about 0.1 s per GB."""
        pages.populate(self.memory, for_writing=False)

    def segment(self, offset: int, length: int) -> memoryview:
        """View of a segment.

        Args:
            offset: of its header, from the start of the arena.
            length: bytes.

        Raises:
            CorruptSegmentError: there can be no such segment.
        """
        if (
            offset < SEGMENTS_START
            or offset % SEGMENT_ALIGNMENT
            or (offset + length > self.offer.size)
        ):
            raise CorruptSegmentError(
                f"no segment of {length} bytes can be at {offset} in an arena of "
                f"{self.offer.size} bytes"
            )
        return self.memory[offset : offset + length]


def _check_file(descriptor: int, offer: ArenaOffer) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise ArenaUnavailableError(f"{offer.name} is not a file of this user")
    if status.st_mode & 0o077:
        raise ArenaUnavailableError(f"{offer.name} is open to other users")
    # Access beyond the end of a file ends the process.
    if status.st_size != offer.size:
        raise ArenaUnavailableError(
            f"{offer.name} has {status.st_size} bytes, not the {offer.size} offered"
        )

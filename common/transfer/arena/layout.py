"""The head of an arena, by which a worker proves that it reads the frontend's memory.

Also :class:`ArenaOffer`, which tells a worker what to look for.
"""

import struct
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from common.errors import ArenaUnavailableError
from common.transfer.arena.file import NAME_PATTERN
from common.transfer.arena.segment_table import SEGMENT_ALIGNMENT

SEGMENTS_START: Final = SEGMENT_ALIGNMENT
"""Where the first segment begins; the head has the page before it to itself."""

NONCE_SIZE: Final = 32

# magic, generation, bytes of the whole arena, nonce
_HEAD: Final = struct.Struct(f"<8sQQ{NONCE_SIZE}s")
_MAGIC: Final = b"mmraren1"

HEAD_SIZE: Final = _HEAD.size
"""Bytes to read for :func:`check_head`."""


class ArenaOffer(BaseModel):
    """What a frontend tells a worker about its arena.

    Attributes:
        name: file name in the shared-memory directory; a name, never a path.
        size: bytes.
        generation: random number of this arena.
        nonce: hexadecimal; stands at the head of the arena, and keys the segments' tags.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    size: Annotated[int, Field(gt=SEGMENTS_START, lt=2**63)]
    generation: Annotated[int, Field(ge=0, lt=2**64)]
    nonce: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * NONCE_SIZE}}}$")]

    @property
    def key(self) -> bytes:
        """Key of the segments' tags."""
        return bytes.fromhex(self.nonce)


def pack_head(offer: ArenaOffer) -> bytes:
    """The bytes at the start of the arena that is offered."""
    return _HEAD.pack(_MAGIC, offer.generation, offer.size, offer.key)


def check_head(arena: memoryview, offer: ArenaOffer) -> None:
    """Check that memory is the arena that was offered.

    Args:
        arena: at least its first :data:`HEAD_SIZE` bytes.

    Raises:
        ArenaUnavailableError: it is another one: of another IPC namespace or host, say.
    """
    if bytes(arena[: _HEAD.size]) != pack_head(offer):
        raise ArenaUnavailableError(
            f"{offer.name} here is not the frontend's arena: its probe does not match"
        )

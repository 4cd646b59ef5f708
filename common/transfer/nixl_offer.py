"""What a frontend tells a worker so that it can read the arena over NIXL."""

import base64
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from common.errors import ArenaUnavailableError
from common.transfer.arena import ArenaOffer
from common.transfer.checksum import KEY_SIZE

_FORMAT: Final = "pieces-2mib:"
"""Names how segments are checked. Stands in front of the metadata, where builds that check them in
another way find no base64: they refuse the offer, with a reason, and media travel inline.
"""


class NixlOffer(BaseModel):
    """How to reach a frontend's arena, and how to tell its bytes from others.

    Attributes:
        agent: name of the agent, unique to this run of the process that serves the arena.
        metadata: :data:`_FORMAT`, then NIXL's own description of how to reach the agent; base64.
        address: of the arena in that process, as registered.
        arena: what the worker must find there.
        checksum_key: hexadecimal; keys the checksums in items' metadata. Frontend and workers
            know it, the processes that hold NIXL agents don't.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    agent: Annotated[str, Field(min_length=1, max_length=255)]
    metadata: Annotated[str, Field(max_length=1 << 17)]
    address: Annotated[int, Field(gt=0, lt=2**64)]
    arena: ArenaOffer
    checksum_key: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * KEY_SIZE}}}$")]

    @property
    def key(self) -> bytes:
        """Key of the checksums."""
        return bytes.fromhex(self.checksum_key)

    @staticmethod
    def pack_metadata(metadata: bytes) -> str:
        """Agent metadata as it stands in an offer."""
        return _FORMAT + base64.b64encode(metadata).decode()

    def unpack_metadata(self) -> bytes:
        """Agent metadata as NIXL wants it.

        Raises:
            ArenaUnavailableError: the frontend checks segments in another way, or it is not
                base64.
        """
        if not self.metadata.startswith(_FORMAT):
            raise ArenaUnavailableError(
                "the frontend checks what NIXL carries in another way; run the same version of "
                "mmrouter on both sides"
            )
        try:
            return base64.b64decode(self.metadata.removeprefix(_FORMAT), validate=True)
        except ValueError as error:
            raise ArenaUnavailableError(f"the offer of {self.agent} is malformed") from error

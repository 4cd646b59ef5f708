"""What the two sides say about transports when a session opens; JSON on the wire.

The frontend offers what it has, the worker answers what it could really use: it has
read the arena's probe by that transport, not compared host names.
"""

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import ProtocolError
from common.transfer.arena_layout import ArenaOffer
from common.transfer.nixl_agent import NixlOffer


class TransferOffer(BaseModel):
    """The frontend's side. The worker tries what is offered in this order and stops at
    the first that works.

    Attributes:
        shm: the arena in shared memory.
        nixl: the same arena over NIXL.
    """

    model_config = ConfigDict(frozen=True)

    shm: ArenaOffer | None = None
    nixl: NixlOffer | None = None


class TransferReply(BaseModel):
    """The worker's side.

    Attributes:
        shm: it mapped the arena and read the probe.
        nixl: it read the probe over NIXL.
        refusals: why what is offered and not used can't be, in sentences.
    """

    model_config = ConfigDict(frozen=True)

    shm: bool = False
    nixl: bool = False
    refusals: tuple[str, ...] = ()


def parse_offer(data: bytes) -> TransferOffer:
    """Read an offer. Raises ProtocolError if it is none."""
    try:
        return TransferOffer.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(f"malformed transfer offer: {error}") from error


def parse_reply(data: bytes) -> TransferReply:
    """Read a reply. Raises ProtocolError if it is none."""
    try:
        return TransferReply.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(f"malformed transfer reply: {error}") from error

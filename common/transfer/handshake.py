"""What the two sides say about transports when a session opens; JSON on the wire.

The frontend offers what it has, the worker answers what it could really use: it has
read the arena's probe, not compared host names.
"""

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import ProtocolError
from common.transfer.arena_layout import ArenaOffer


class TransferOffer(BaseModel):
    """The frontend's side.

    Attributes:
        shm: its arena, None if it has none.
    """

    model_config = ConfigDict(frozen=True)

    shm: ArenaOffer | None = None


class TransferReply(BaseModel):
    """The worker's side.

    Attributes:
        shm: it mapped the arena and read the probe.
        shm_refusal: why it could not, in a sentence.
    """

    model_config = ConfigDict(frozen=True)

    shm: bool = False
    shm_refusal: str = ""


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

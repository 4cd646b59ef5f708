"""Transport negotiation of a session; JSON on the wire.

The frontend offers transports; the worker answers with the ones that it has proven by reading the
arena's probe, instead of comparing host names.

NIXL starts only when a worker needs it: the first offer has none unless NIXL is the only allowed
transport. A worker that can't map the arena but could use NIXL says so. The frontend then offers
NIXL in the running session once it is ready.
"""

import base64
from pathlib import Path
from typing import Annotated, Final, TypeAlias, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from common.bounded_json import JsonLimits, MalformedJsonError
from common.errors import ArenaUnavailableError, ProtocolError
from common.transfer.arena import ArenaOffer
from common.transfer.checksum import KEY_SIZE
from common.transfer.metadata import Transport

_FORMAT: Final = "pieces-2mib:"
"""Names how segments are checked. Stands in front of the metadata, where builds that check them in
another way find no base64: they refuse the offer, with a reason, and media travel inline."""

MAX_REFUSAL_LEN: Final = 1024  # characters


class NixlOffer(BaseModel):
    """Address of a frontend's arena over NIXL, and the proofs of its bytes.

    Attributes:
        agent: name of the agent, unique to this run of the process that serves the arena.
        metadata: :data:`_FORMAT`, then NIXL's description of the agent's address; base64.
        address: of the arena in that process, as registered.
        arena: must be found at the address.
        checksum_key: hexadecimal; keys the checksums in items' metadata. Frontend and workers know
            it, the processes with NIXL agents don't.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    agent: Annotated[str, Field(min_length=1, max_length=255)]
    metadata: Annotated[str, Field(max_length=1 << 17)]
    address: Annotated[int, Field(gt=0, lt=2**64)]
    arena: ArenaOffer
    checksum_key: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * KEY_SIZE}}}$")]

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.checksum_key)

    @staticmethod
    def pack_metadata(metadata: bytes) -> str:
        """Encode agent metadata for an offer."""
        return _FORMAT + base64.b64encode(metadata).decode()

    def unpack_metadata(self) -> bytes:
        """Decode agent metadata. Raises ArenaUnavailableError: other check method, or no base64."""
        if not self.metadata.startswith(_FORMAT):
            raise ArenaUnavailableError(
                "the frontend checks what NIXL carries in another way; run the same version of "
                "mmrouter on both sides"
            )
        try:
            return base64.b64decode(self.metadata.removeprefix(_FORMAT), validate=True)
        except ValueError as error:
            raise ArenaUnavailableError(f"the offer of {self.agent} is malformed") from error


class TransferOffer(BaseModel):
    """The frontend's offer. The worker tries it in the order of its receivers (``transports.py``),
    up to the first that works.

    Attributes:
        shm: the arena in shared memory; None unless offered.
        nixl: the same arena over NIXL; None unless offered.
        ipc: the frontend's IPC namespace, see :func:`namespace`.
        loopback: its network namespace, likewise.
    """

    model_config = ConfigDict(frozen=True)

    shm: ArenaOffer | None = None
    ipc: str = ""
    loopback: str = ""
    nixl: NixlOffer | None = None

    @property
    def transports(self) -> list[str]:
        return [name for name in get_args(Transport) if getattr(self, name, None) is not None]


def _shown(refusal: str) -> str:
    """Shorten a refusal to one printable line, for logs: it quotes untrusted text."""
    line = "".join(each if each.isprintable() else " " for each in refusal[:MAX_REFUSAL_LEN])
    return line if len(refusal) <= MAX_REFUSAL_LEN else f"{line}..."


_Refusal: TypeAlias = Annotated[str, AfterValidator(_shown)]


class TransferReply(BaseModel):
    """The worker's reply.

    Attributes:
        shm: it mapped the arena and read the probe.
        nixl: agent over which it read the probe by NIXL; empty if it didn't.
        could_nixl: it would try NIXL if that were offered.
        same_ipc: it is in the frontend's IPC namespace.
        same_loopback: it is in the frontend's network namespace.
        refusals: reasons why offered transports are not used.
    """

    model_config = ConfigDict(frozen=True)

    shm: bool = False
    nixl: str = ""
    could_nixl: bool = False
    same_ipc: bool = False
    same_loopback: bool = False
    refusals: Annotated[tuple[_Refusal, ...], Field(max_length=16)] = ()


_LIMITS: Final = JsonLimits(most_bytes=1 << 18, most_commas=1 << 10)
"""The largest part of either is an agent's metadata."""

_offer: Final = TypeAdapter(TransferOffer)
_reply: Final = TypeAdapter(TransferReply)


def namespace(kind: str) -> str:
    """Return a host-unique name of this process's namespace (``ipc`` or ``net``); empty if unknown.
    Only a hint whether a transport is worth trying."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:
        return ""


def parse_offer(data: bytes) -> TransferOffer:
    """Parse an offer. Raises ProtocolError: it is malformed."""
    try:
        return _LIMITS.read(_offer, data)
    except MalformedJsonError as error:
        raise ProtocolError(f"malformed transfer offer: {error}") from error


def parse_reply(data: bytes) -> TransferReply:
    """Parse a reply. Raises ProtocolError: it is malformed."""
    try:
        return _LIMITS.read(_reply, data)
    except MalformedJsonError as error:
        raise ProtocolError(f"malformed transfer reply: {error}") from error

"""What the two sides say about transports when a session opens; JSON on the wire.

The frontend offers what it has, the worker answers what it could really use: it has
read the arena's probe by that transport, not compared host names.

A frontend starts NIXL only once a worker needs it: the first offer has none unless the frontend
is told to use nothing else. If the worker can't map the arena and could use NIXL it says so, and
the frontend offers that in the running session when it is ready.
"""

from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import ProtocolError
from common.transfer.arena import ArenaOffer
from common.transfer.metadata import Transport
from common.transfer.nixl_offer import NixlOffer


class TransferOffer(BaseModel):
    """The frontend's side. The worker tries what is offered in the order of its receivers
    (``registry.py``) and stops at the first that works. A transport's field bears its name, and is
    None unless it is offered.

    Attributes:
        shm: the arena in shared memory.
        nixl: the same arena over NIXL.
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
        """Names of the transports that are offered."""
        return [name for name in get_args(Transport) if getattr(self, name, None) is not None]


class TransferReply(BaseModel):
    """The worker's side.

    Attributes:
        shm: it mapped the arena and read the probe.
        nixl: agent over which it read the probe by NIXL; empty if it didn't.
        could_nixl: it would try NIXL if that were offered.
        same_ipc: it is in the frontend's IPC namespace.
        same_loopback: it is in the frontend's network namespace.
        refusals: why what is offered and not used can't be, in sentences.
    """

    model_config = ConfigDict(frozen=True)

    shm: bool = False
    nixl: str = ""
    could_nixl: bool = False
    same_ipc: bool = False
    same_loopback: bool = False
    refusals: tuple[str, ...] = ()


def namespace(kind: str) -> str:
    """This process's namespace, told from those of other hosts; empty if that can't be told. It
    only says whether a transport is worth trying.

    Args:
        kind: the kernel's name for it, ``ipc`` or ``net``.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:
        return ""


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

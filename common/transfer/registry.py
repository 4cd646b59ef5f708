"""Every transport that processes of ours use: which ends they have.

The one place that lists them. Each offers, proves and accepts under its own name.
"""

from typing import Any

from common.transfer.arena import ArenaAccess
from common.transfer.base import LateSender, MmKwargsReceiver, MmKwargsSender
from common.transfer.choice import TransferMode, wanted
from common.transfer.inline import (
    InlineReceiver,
    InlineSender,
    ReferenceReceiver,
    ReferenceSender,
    Render,
)
from common.transfer.nixl import LateNixl, NixlReceiver
from common.transfer.nixl_processes import NixlNetwork
from common.transfer.shm import ShmReceiver, ShmSender


def senders(arena: ArenaAccess | None, mode: TransferMode) -> list[MmKwargsSender]:
    """A frontend's ends that cost nothing to have.

    Args:
        arena: shared memory to lease from, None to send everything inline.
    """
    ends: list[MmKwargsSender] = [InlineSender(), ReferenceSender()]
    if arena is not None and "shm" in wanted(mode):
        ends.append(ShmSender(arena))
    return ends


def late_senders(
    arena: ArenaAccess | None, mode: TransferMode, network: NixlNetwork
) -> list[LateSender]:
    """A frontend's ends that are started once a worker needs them.

    Args:
        network: over which they may go.
    """
    return [LateNixl(arena, network)] if arena is not None and "nixl" in wanted(mode) else []


def receivers(render: Render, nixl: NixlReceiver | None = None) -> list[MmKwargsReceiver[Any]]:
    """A worker's ends, in the order in which it tries what is offered.

    Args:
        render: processes a medium that was not transferred.
        nixl: None if this worker has no NIXL.
    """
    own = [] if nixl is None else [nixl]
    return [InlineReceiver(), ReferenceReceiver(render), ShmReceiver(), *own]

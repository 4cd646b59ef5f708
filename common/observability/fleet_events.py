"""Recent events of this process's workers, for operators who come later."""

import time
from collections import deque
from enum import StrEnum
from typing import Final

import msgspec

from common.identity import WorkerId

_KEPT: Final = 200
_MAX_REASON_LEN: Final = 500


class What(StrEnum):
    JOINED = "joined"
    LOST = "lost"
    REMOVED = "removed"
    REFUSED = "refused"
    EJECTED = "ejected"
    DRAINED = "drained"
    REINSTATED = "reinstated"


class FleetEvent(msgspec.Struct, frozen=True):
    """One event; ``at`` is in seconds since the epoch."""

    at: float
    worker_id: WorkerId
    what: What
    reason: str


_events: Final[deque[FleetEvent]] = deque(maxlen=_KEPT)


def note(what: What, worker_id: WorkerId, reason: str = "") -> None:
    _events.append(FleetEvent(time.time(), worker_id, what, reason[:_MAX_REASON_LEN]))


def recent() -> list[FleetEvent]:
    """Return the last events of this process, oldest first."""
    return list(_events)

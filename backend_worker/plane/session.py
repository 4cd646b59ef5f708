"""A worker's end of the connection to one frontend: what belongs to it. And frontends without."""

import asyncio
import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from backend_worker.plane.frontend_loads import Account
from backend_worker.plane.outbox import Outbox
from backend_worker.plane.request import WorkerRequest
from common.identity import Incarnation, RequestId
from common.request_plane.protocol import MOST_COMING, Coming, Refused, Status
from common.transfer.base import Attachment

logger = logging.getLogger(__name__)

REMIND_S: Final = 60.0  # between lines about the same frontend
LONELY_S: Final = 600.0  # between lines about there being no frontend, after the first
MAX_REFUSING: Final = 16  # frontends logged in that time: who says so may be anybody on this host


@dataclass(eq=False)
class Session:
    """One frontend, by the ROUTER's name for its socket.

    Attributes:
        attachment: its hold on the frontend's memory.
        last_heard: monotonic seconds.
        coming: what others sent here, of which it was not told yet; the oldest make way.
        telling: whether it is being told this worker's metrics.
        asides: tasks aside that it caused and that have not ended.
        operating: its operations that are not answered yet.
        steps_told: when it was told last what steps add up to, in monotonic seconds.
        adapters_told: after which change of its adapters it was told them last.
        ended: nothing is sent to it any more.
    """

    address: bytes
    frontend_id: Incarnation
    attachment: Attachment
    last_heard: float
    account: Account
    outbox: Outbox
    coming: deque[Coming] = field(default_factory=lambda: deque(maxlen=MOST_COMING))
    requests: dict[RequestId, WorkerRequest] = field(default_factory=dict)
    renewing: asyncio.Lock = field(default_factory=asyncio.Lock)
    telling: bool = False
    asides: int = 0
    operating: int = 0
    steps_told: float = -math.inf
    adapters_told: int = 0
    active_told: tuple[str, ...] | None = ()
    ended: bool = False

    def aside_ended(self) -> None:
        self.asides -= 1

    def untold(self, status: Status) -> None:
        """What it was to be told of was not sent, and is told with the next report."""
        since = [*self.coming]
        self.coming.clear()
        self.coming.extend((*status.coming, *since))
        if status.adapters is not None:
            self.adapters_told = -1
        if status.active_adapters is not None:
            self.active_told = None


class Absent:
    """Log which frontends refuse this worker, and that none has come at all.

    A frontend that refuses a worker has no session with it, so it proves nothing but that it is
    let in: what it says is logged and changes nothing.
    """

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._lonely_at = time.monotonic() + REMIND_S

    def refused(self, message: Refused, of: Incarnation) -> None:
        """Log a refusal of this run, once a minute for a frontend."""
        if message.incarnation != of:
            return  # its port was another worker's
        now = time.monotonic()
        self._told = {who: at for who, at in self._told.items() if now - at < REMIND_S}
        if message.frontend in self._told or len(self._told) >= MAX_REFUSING:
            return
        self._told[message.frontend] = now
        said = message.frontend, message.reason
        logger.warning(
            "frontend %s refuses this worker and sends it no requests: %s",
            *(each if each.isprintable() else ascii(each) for each in said),
        )

    def look(self, *, some: bool) -> None:
        """Log that no frontend has come yet, after a minute and then every ten; ``some`` have
        now."""
        if some:
            self._lonely_at = math.inf
        if time.monotonic() < self._lonely_at:
            return
        self._lonely_at = time.monotonic() + LONELY_S
        if not self._told:
            logger.warning(
                "no frontend has connected to this worker yet: start one with the same --discovery "
                "and the same --fleet-key-file; one that refuses this worker "
                "for its key can only say so in its own log and at /mmrouter/workers/refused"
            )

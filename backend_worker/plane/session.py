"""State of one frontend's session on a worker, and log lines about missing frontends."""

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
from common.request_plane.protocol import MAX_COMING, Coming, Refused, Status
from common.transfer.base import Attachment

logger = logging.getLogger(__name__)

REMIND_S: Final = 60.0  # between lines about the same frontend
LONELY_S: Final = 600.0  # between lines about there being no frontend, after the first
MAX_REFUSING: Final = 16  # frontends logged per interval: any local process may claim to be one


@dataclass(eq=False)
class Session:
    """Session of one frontend, by the ROUTER's name for its socket.

    Attributes:
        attachment: the session's hold on the frontend's memory.
        last_heard: monotonic seconds.
        coming: requests of other frontends not reported yet; the oldest are dropped.
        telling: a metrics answer is under way.
        asides: running tasks that this frontend caused.
        operating: unanswered operations of this frontend.
        steps_told: time of the last report of step sums, in monotonic seconds.
        adapters_told: the change count of the adapters last reported.
        ended: nothing more is sent.
    """

    address: bytes
    frontend_id: Incarnation
    attachment: Attachment
    last_heard: float
    account: Account
    outbox: Outbox
    coming: deque[Coming] = field(default_factory=lambda: deque(maxlen=MAX_COMING))
    requests: dict[RequestId, WorkerRequest] = field(default_factory=dict)
    renewing: asyncio.Lock = field(default_factory=asyncio.Lock)
    telling: bool = False
    asides: set[asyncio.Task[None]] = field(default_factory=set)
    operating: int = 0
    steps_told: float = -math.inf
    adapters_told: int = 0
    active_told: tuple[str, ...] | None = ()
    ended: bool = False

    def untold(self, status: Status) -> None:
        """Restore what an unsent status would have reported, for the next report."""
        since = [*self.coming]
        self.coming.clear()
        self.coming.extend((*status.coming, *since))
        if status.adapters is not None:
            self.adapters_told = -1
        if status.active_adapters is not None:
            self.active_told = None


class Absent:
    """Log frontends that refuse this worker, and the absence of any frontend. A refusing frontend
    has no session and proves only that it is let in: its message is logged and changes nothing."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._lonely_at = time.monotonic() + REMIND_S

    def refused(self, message: Refused, of: Incarnation) -> None:
        """Log a refusal of this run, once a minute per frontend."""
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
        """Log after a minute, then every ten, that no frontend has come; ``some`` ends this."""
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

"""A worker's end of the connection to one frontend: what belongs to it."""

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

from backend_worker.plane.frontend_loads import Account
from backend_worker.plane.outbox import Outbox
from backend_worker.plane.request import WorkerRequest
from common.identity import Incarnation, RequestId
from common.request_plane.protocol import MOST_COMING, Coming, Status
from common.transfer.base import Attachment


@dataclass(eq=False)
class Session:
    """One frontend, by the ROUTER's name for its socket.

    Attributes:
        attachment: its hold on the frontend's memory.
        last_heard: monotonic seconds.
        coming: what others sent here, of which it was not told yet; the oldest make way.
        telling: whether it is being told this worker's metrics.
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
    operating: int = 0
    steps_told: float = -math.inf
    adapters_told: int = 0
    active_told: tuple[str, ...] | None = ()
    ended: bool = False

    def untold(self, status: Status) -> None:
        """What it was to be told of was not sent, and is told with the next report."""
        since = [*self.coming]
        self.coming.clear()
        self.coming.extend((*status.coming, *since))
        if status.adapters is not None:
            self.adapters_told = -1
        if status.active_adapters is not None:
            self.active_told = None

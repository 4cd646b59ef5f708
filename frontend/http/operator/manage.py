"""What an operator may do to a worker, at all processes of this frontend."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from http import HTTPStatus

import msgspec
from fastapi import APIRouter, HTTPException
from pydantic import BaseModel

from common.identity import Incarnation, WorkerId
from common.observability.fleet_events import What, note
from frontend.processes import Siblings
from frontend.router import Router


class Action(StrEnum):
    """What happens to a worker.

    Drained it gets no request until it is reinstated, ejected for a while, as after errors. Neither
    touches requests that it has, nor what other frontends send there.
    """

    DRAIN = "drain"
    EJECT = "eject"
    REINSTATE = "reinstate"


class Order(msgspec.Struct, frozen=True):
    """What is to be done to one run of a worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    action: Action


class Done(BaseModel):
    """What was done.

    Attributes:
        processes: of this frontend that did it.
    """

    worker_id: WorkerId
    incarnation: str
    action: Action
    processes: int


class Management:
    """Carry out orders at the routers of all models, here and at the other processes."""

    def __init__(self, routers: Callable[[], Iterable[Router]], siblings: Siblings | None) -> None:
        self._routers = routers
        self._siblings = siblings
        if siblings is not None:
            orders = msgspec.json.Decoder(Order)
            siblings.tell("manage", lambda said: self._obey(orders.decode(said)))
            siblings.tell("drained", lambda _: msgspec.json.encode(self._drained()))

    async def learn(self) -> None:
        """A process that was started again drains what the others do."""
        if self._siblings is None:
            return
        runs = msgspec.json.Decoder(dict[WorkerId, Incarnation])
        for _, body in await self._siblings.ask("drained"):
            for worker_id, incarnation in runs.decode(body).items():
                for router in self._routers():
                    router.drained[worker_id] = incarnation

    async def act(self, worker_id: WorkerId, action: Action) -> Done:
        """Do something to whoever serves under a worker id.

        Raises:
            HTTPException: nobody does.
        """
        found = (router.roster.workers.get(worker_id) for router in self._routers())
        worker = next((each for each in found if each is not None), None)
        if worker is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no worker {worker_id!r}")
        order = Order(worker_id, worker.incarnation, action)
        self._obey(order)
        others = 0
        if self._siblings is not None:
            others = len(await self._siblings.ask("manage", msgspec.json.encode(order)))
        return Done(
            worker_id=worker_id,
            incarnation=worker.incarnation,
            action=action,
            processes=1 + others,
        )

    def _drained(self) -> dict[WorkerId, Incarnation]:
        return dict(run for router in self._routers() for run in router.drained.items())

    def _obey(self, order: Order) -> bytes:
        routers = list(self._routers())
        having = [router for router in routers if order.worker_id in router.roster.workers]
        for router in having or routers:  # it may be there later
            _obey(router, order)
        return b""


def _obey(router: Router, order: Order) -> None:
    drained, ejection = router.drained, router.ejection
    match order.action:
        case Action.DRAIN:
            drained[order.worker_id] = order.incarnation
            note(What.DRAINED, order.worker_id, "by an operator")
        case Action.EJECT:
            ejection.eject(order.worker_id, order.incarnation, "an operator")
        case Action.REINSTATE:
            drained.pop(order.worker_id, None)
            ejection.forget(order.worker_id)
            note(What.REINSTATED, order.worker_id, "by an operator")


def manage_routes(management: Management) -> APIRouter:
    """The routes under ``/mmrouter/workers``, for admins."""
    api = APIRouter(prefix="/mmrouter", tags=["mmrouter"])

    @api.post("/workers/{worker_id}/{action}")
    async def act(worker_id: str, action: Action) -> Done:
        """Drain or eject a worker, or reinstate it."""
        return await management.act(WorkerId(worker_id), action)

    return api

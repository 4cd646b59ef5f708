"""Drain, eject and reinstate workers, at all processes of this frontend."""

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
    """An action on a worker.

    A drained worker gets no request until it is reinstated; an ejected one gets none for a while,
    as after errors. Running requests and other frontends are not affected.
    """

    DRAIN = "drain"
    EJECT = "eject"
    REINSTATE = "reinstate"


class Order(msgspec.Struct, frozen=True):
    """An action on one incarnation of a worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    action: Action


class Done(BaseModel):
    """Result of an action; ``processes`` counts the processes of this frontend that applied it."""

    worker_id: WorkerId
    incarnation: str
    action: Action
    processes: int


class Management:
    """Apply orders to the routers of all models, here and in the sibling processes."""

    def __init__(self, routers: Callable[[], Iterable[Router]], siblings: Siblings | None) -> None:
        self._routers = routers
        self._siblings = siblings
        if siblings is not None:
            orders = msgspec.json.Decoder(Order)
            siblings.tell("manage", lambda said: self._obey(orders.decode(said)))
            siblings.tell("drained", lambda _: msgspec.json.encode(self._drained()))

    async def learn(self) -> None:
        """Drain the workers that siblings drain, since this process may have been restarted."""
        if self._siblings is None:
            return
        runs = msgspec.json.Decoder(dict[WorkerId, Incarnation])
        for body in (await self._siblings.ask("drained")).values():
            for worker_id, incarnation in runs.decode(body).items():
                for router in self._routers():
                    router.drained[worker_id] = incarnation

    async def act(self, worker_id: WorkerId, action: Action) -> Done:
        """Act on the worker of an id. Raises HTTPException (404) if there is none."""
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
        for router in having or routers:  # the worker may join later
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
    """Return the admins' routes under ``/mmrouter/workers``."""
    api = APIRouter(prefix="/mmrouter", tags=["mmrouter"])

    @api.post("/workers/{worker_id}/{action}")
    async def act(worker_id: str, action: Action) -> Done:
        """Drain or eject a worker, or reinstate it."""
        return await management.act(WorkerId(worker_id), action)

    return api

"""What the frontend knows, as JSON for people and tests: workers and decisions."""

from typing import Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from common.identity import Target, WorkerId
from frontend.router import Router
from frontend.workers import Fleet, MediaSender, Member


class RankView(BaseModel):
    """What the router knows of one rank.

    Attributes:
        busy: it has so much to do that it gets no new requests.
        index: what is known of its cache: exact, degraded or approximate.
    """

    rank: int
    busy: bool
    index: str
    reason: str


class WorkerView(BaseModel):
    """One worker with a card that fits.

    Attributes:
        transport: how media travel to it; None while it is not connected.
        circuit: closed, open or half-open; errors and stalls open it for a while.
        circuit_reason: why it is not closed.
        active_requests: of this frontend.
        running, waiting, kv_usage, hf_processor_runs: as the worker reported last;
            None before its first report.
    """

    worker_id: WorkerId
    incarnation: str
    state: str
    connected: bool
    request_endpoint: str
    transport: str | None
    circuit: str
    circuit_reason: str
    ranks: list[RankView]
    active_requests: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    hf_processor_runs: int | None


class RefusedView(BaseModel):
    """A worker whose card does not fit, and why."""

    worker_id: WorkerId
    reason: str


def status_routes(fleet: Fleet, router: Router, media_sender: MediaSender) -> APIRouter:
    """The routes under ``/mmrouter``."""
    api = APIRouter(prefix="/mmrouter", tags=["mmrouter"])

    def rank_view(target: Target) -> RankView:
        state = router.roster.state(target)
        return RankView(
            rank=target.rank,
            busy=target in router.load.busy(),
            index=state.knowledge.value,
            reason=state.reason,
        )

    def view(member: Member) -> WorkerView:
        card, link, status = member.card, member.link, member.status
        circuit, circuit_reason = router.ejection.circuit(card.worker_id)
        return WorkerView(
            worker_id=card.worker_id,
            incarnation=card.incarnation,
            state=card.state,
            connected=link is not None,
            request_endpoint=card.request_endpoint,
            transport=media_sender.transport(card.worker_id),
            circuit=circuit,
            circuit_reason=circuit_reason,
            ranks=[rank_view(Target(card.worker_id, rank)) for rank in range(card.num_ranks)],
            active_requests=0 if link is None else link.active_requests,
            running=None if status is None else status.running,
            waiting=None if status is None else status.waiting,
            kv_usage=None if status is None else status.kv_usage,
            hf_processor_runs=None if status is None else status.hf_processor_runs,
        )

    @api.get("/workers")
    async def workers() -> list[WorkerView]:
        """Workers whose cards fit."""
        return [view(member) for member in fleet.members.shown()]

    @api.get("/workers/refused")
    async def refused() -> list[RefusedView]:
        """Workers whose cards don't fit."""
        return [
            RefusedView(worker_id=worker_id, reason=reason)
            for worker_id, reason in fleet.refusals.by_worker().items()
        ]

    @api.get("/decisions")
    async def decisions(
        request_id: str | None = Query(None, description="id of a response of the API"),
        last: int = Query(50, ge=1, le=1000),
    ) -> list[dict[str, Any]]:
        """Routing decisions: those of one response, or the last ones, newest first.

        Clients may choose ids, so one id can be that of several responses.
        """
        log = router.decisions
        found = log.last(last) if request_id is None else log.find(request_id)
        return [decision.as_json() for decision in found]

    return api

"""What the frontend knows, as JSON for people and tests: workers and decisions."""

from typing import Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from common.identity import Target, WorkerId
from common.protocol import RankStatus
from frontend.router import Knowledge, Router, TargetLoad
from frontend.workers import Fleet, MediaSender, Member


class ShareView(BaseModel):
    """What somebody has on a rank: requests, and tokens as routing counts them.

    Attributes:
        prefill_tokens: to compute, of requests without an output.
        decode_tokens: prompt tokens of requests with one.
    """

    requests: int
    prefill_tokens: int
    decode_tokens: int


class RankView(BaseModel):
    """What the router knows of one rank.

    Attributes:
        busy: it has so much to do that it gets no new requests.
        index: what is known of its cache: exact, degraded or approximate.
        reason: why it is not exact, and how much is known meanwhile.
        blocks: that it holds as far as its events were applied.
        own: what this frontend has there.
        others: what others have there, as the worker reported last.
        running, waiting, kv_usage: of its engine, as the worker reported last; None before
            its first report.
    """

    rank: int
    busy: bool
    index: str
    reason: str
    blocks: int
    own: ShareView
    others: ShareView
    running: int | None
    waiting: int | None
    kv_usage: float | None


class IndexView(BaseModel):
    """What is known of the caches of all workers together.

    Attributes:
        ranks: of all workers that requests may go to.
        exact, degraded, approximate: how many of them are known how well.
        exact_share: of all ranks; 1 if there are none.
        blocks: that they hold as far as their events were applied.
    """

    ranks: int
    exact: int
    degraded: int
    approximate: int
    exact_share: float
    blocks: int


class WorkerView(BaseModel):
    """One worker with a card that fits.

    Attributes:
        transport: how media travel to it; None while it is not connected.
        circuit: closed, open or half-open; errors and stalls open it for a while.
        circuit_reason: why it is not closed.
        active_requests: of this frontend.
        running, waiting, hf_processor_runs: over all ranks, and kv_usage of the fullest, as
            the worker reported last; None before its first report.
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


def _reports(member: Member) -> list[RankStatus]:
    return [] if member.status is None else member.status.ranks


def _share(load: TargetLoad) -> ShareView:
    return ShareView(
        requests=load.active,
        prefill_tokens=load.prefill_tokens,
        decode_tokens=load.decode_tokens,
    )


def _rank_view(router: Router, member: Member, rank: int) -> RankView:
    target = Target(member.card.worker_id, rank)
    state = router.roster.state(target)
    own, others = router.load.shares(target)
    report = next((one for one in _reports(member) if one.rank == rank), None)
    return RankView(
        rank=rank,
        busy=target in router.load.busy(),
        index=state.knowledge.value,
        reason=state.reason,
        blocks=router.roster.blocks(target),
        own=_share(own),
        others=_share(others),
        running=None if report is None else report.running,
        waiting=None if report is None else report.waiting,
        kv_usage=None if report is None else report.kv_usage,
    )


def status_routes(fleet: Fleet, router: Router, media_sender: MediaSender) -> APIRouter:
    """The routes under ``/mmrouter``."""
    api = APIRouter(prefix="/mmrouter", tags=["mmrouter"])

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
            ranks=[_rank_view(router, member, rank) for rank in card.ranks],
            active_requests=0 if link is None else link.active_requests,
            running=None if status is None else sum(one.running for one in status.ranks),
            waiting=None if status is None else sum(one.waiting for one in status.ranks),
            kv_usage=None if status is None else max(one.kv_usage for one in status.ranks),
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

    @api.get("/index")
    async def index() -> IndexView:
        """How much of the fleet's caches is known."""
        return _index_view(router)

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


def _index_view(router: Router) -> IndexView:
    roster = router.roster
    knowledge = roster.knowledge()
    ranks = sum(knowledge.values())
    exact = knowledge[Knowledge.EXACT]
    return IndexView(
        ranks=ranks,
        exact=exact,
        degraded=knowledge[Knowledge.DEGRADED],
        approximate=knowledge[Knowledge.APPROXIMATE],
        exact_share=exact / ranks if ranks else 1.0,
        blocks=sum(map(roster.blocks, roster.targets())),
    )

"""What the frontend knows, as JSON for people and tests: workers and decisions."""

from typing import Any

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, TypeAdapter

from common.identity import Target, WorkerId
from frontend.processes import Siblings
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


class ProcessView(BaseModel):
    """How one process of the frontend stands with a worker; the fields are a worker's."""

    process: str
    connected: bool
    transport: str | None
    circuit: str
    active_requests: int


class WorkerView(BaseModel):
    """One worker with a card that fits.

    Where the frontend has several processes, it is connected if it is to all of them, and in any
    other respect as the process has it that has it worst.

    Attributes:
        transport: how media travel to it; None while it is not connected.
        circuit: closed, open or half-open; errors and stalls open it for a while.
        circuit_reason: why it is not closed.
        active_requests: of this frontend.
        running, waiting, kv_usage, hf_processor_runs: as the worker reported last;
            None before its first report.
        processes: how each process stands with it; only where there are several.
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
    processes: list[ProcessView] = []


class RefusedView(BaseModel):
    """A worker whose card does not fit, and why."""

    worker_id: WorkerId
    reason: str


class Status:
    """What this process knows."""

    def __init__(self, fleet: Fleet, router: Router, media_sender: MediaSender) -> None:
        self._fleet = fleet
        self._router = router
        self._media_sender = media_sender

    def workers(self) -> list[WorkerView]:
        """Workers whose cards fit."""
        return [self._view(member) for member in self._fleet.members.shown()]

    def refused(self) -> list[RefusedView]:
        """Workers whose cards don't fit."""
        return [
            RefusedView(worker_id=worker_id, reason=reason)
            for worker_id, reason in self._fleet.refusals.by_worker().items()
        ]

    def decisions(self, wanted: "Wanted") -> list[dict[str, Any]]:
        """Routing decisions: those of one response, or the last ones, newest first."""
        log = self._router.decisions
        found = log.last(wanted.last) if wanted.request_id is None else log.find(wanted.request_id)
        return [decision.as_json() for decision in found]

    def _rank(self, target: Target) -> RankView:
        state = self._router.roster.state(target)
        return RankView(
            rank=target.rank,
            busy=target in self._router.load.busy(),
            index=state.knowledge.value,
            reason=state.reason,
        )

    def _view(self, member: Member) -> WorkerView:
        card, link, status = member.card, member.link, member.status
        circuit, circuit_reason = self._router.ejection.circuit(card.worker_id)
        return WorkerView(
            worker_id=card.worker_id,
            incarnation=card.incarnation,
            state=card.state,
            connected=link is not None,
            request_endpoint=card.request_endpoint,
            transport=self._media_sender.transport(card.worker_id),
            circuit=circuit,
            circuit_reason=circuit_reason,
            ranks=[self._rank(Target(card.worker_id, rank)) for rank in range(card.num_ranks)],
            active_requests=0 if link is None else link.active_requests,
            running=None if status is None else status.running,
            waiting=None if status is None else status.waiting,
            kv_usage=None if status is None else status.kv_usage,
            hf_processor_runs=None if status is None else status.hf_processor_runs,
        )


class Wanted(msgspec.Struct, frozen=True):
    """Which decisions somebody wants to see.

    Attributes:
        request_id: id of a response of the API; None for the last ones.
    """

    request_id: str | None
    last: int


_workers = TypeAdapter(list[WorkerView])
_refused = TypeAdapter(list[RefusedView])


class FleetStatus:
    """What all processes of this frontend know."""

    def __init__(self, own: Status, siblings: Siblings | None) -> None:
        """
        Args:
            own: what this one knows; it is told to the others too.
            siblings: the others, if there are any.
        """
        self._own = own
        self._siblings = siblings
        if siblings is not None:
            siblings.tell("workers", lambda _: _workers.dump_json(own.workers()))
            siblings.tell("refused", lambda _: _refused.dump_json(own.refused()))
            wanted = msgspec.json.Decoder(Wanted)
            siblings.tell(
                "decisions", lambda said: msgspec.json.encode(own.decisions(wanted.decode(said)))
            )

    async def workers(self) -> list[WorkerView]:
        """Workers whose cards fit."""
        if self._siblings is None:
            return self._own.workers()
        told = {self._siblings.name: self._own.workers()}
        for name, body in await self._siblings.ask("workers"):
            told[name] = _workers.validate_json(body)
        return merged_workers(told)

    async def refused(self) -> list[RefusedView]:
        """Workers whose cards don't fit."""
        found = self._own.refused()
        if self._siblings is not None:
            for _, body in await self._siblings.ask("refused"):
                found += [each for each in _refused.validate_json(body) if each not in found]
        return found

    async def decisions(self, wanted: Wanted) -> list[dict[str, Any]]:
        """Routing decisions, each with the process that made it where there are several."""
        found = self._own.decisions(wanted)
        if self._siblings is None:
            return found
        for each in found:
            each["process"] = self._siblings.name
        for name, body in await self._siblings.ask("decisions", msgspec.json.encode(wanted)):
            found += [each | {"process": name} for each in msgspec.json.decode(body)]
        oldest_first = wanted.request_id is not None
        found.sort(key=lambda each: each["time"], reverse=not oldest_first)
        return found if oldest_first else found[: wanted.last]


_CIRCUITS = ("closed", "half-open", "open")
_KNOWLEDGE = ("exact", "degraded", "approximate")


def merged_workers(told: dict[str, list[WorkerView]]) -> list[WorkerView]:
    """What all processes say of workers, one view for each.

    Args:
        told: by process; the first is the one that was asked.
    """
    by_worker: dict[tuple[str, str], dict[str, WorkerView]] = {}
    for name, views in told.items():
        for view in views:
            by_worker.setdefault((view.worker_id, view.incarnation), {})[name] = view
    return [_merged(views, len(told)) for views in by_worker.values()]


def _merged(views: dict[str, WorkerView], processes: int) -> WorkerView:
    each = list(views.values())
    worst = max(each, key=lambda view: _CIRCUITS.index(view.circuit))
    reports = [view for view in each if view.running is not None]
    return (reports or each)[0].model_copy(
        update={
            "connected": len(each) == processes and all(view.connected for view in each),
            "transport": next((view.transport for view in each if view.transport), None),
            "circuit": worst.circuit,
            "circuit_reason": worst.circuit_reason,
            "ranks": [
                _merged_rank(ranks) for ranks in zip(*(view.ranks for view in each), strict=True)
            ],
            "active_requests": sum(view.active_requests for view in each),
            "processes": [
                ProcessView(
                    process=name,
                    connected=view.connected,
                    transport=view.transport,
                    circuit=view.circuit,
                    active_requests=view.active_requests,
                )
                for name, view in sorted(views.items())
            ],
        }
    )


def _merged_rank(ranks: tuple[RankView, ...]) -> RankView:
    worst = max(ranks, key=lambda rank: _KNOWLEDGE.index(rank.index))
    return worst.model_copy(update={"busy": any(rank.busy for rank in ranks)})


def status_routes(status: FleetStatus, *, several: bool) -> APIRouter:
    """The routes under ``/mmrouter``.

    Args:
        several: whether the frontend has several processes.
    """
    api = APIRouter(prefix="/mmrouter", tags=["mmrouter"])
    hidden = None if several else {"__all__": {"processes"}}

    @api.get("/workers", response_model_exclude=hidden)
    async def workers() -> list[WorkerView]:
        """Workers whose cards fit."""
        return await status.workers()

    @api.get("/workers/refused")
    async def refused() -> list[RefusedView]:
        """Workers whose cards don't fit."""
        return await status.refused()

    @api.get("/decisions")
    async def decisions(
        request_id: str | None = Query(None, description="id of a response of the API"),
        last: int = Query(50, ge=1, le=1000),
    ) -> list[dict[str, Any]]:
        """Routing decisions: those of one response, or the last ones, newest first.

        Clients may choose ids, so one id can be that of several responses.
        """
        return await status.decisions(Wanted(request_id, last))

    return api

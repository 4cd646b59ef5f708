"""Workers and routing decisions as JSON, for people and tests."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, TypeAdapter

from common.cli.known_flags import version_line
from common.identity import Target, WorkerId
from common.observability.fleet_events import recent
from common.observability.telemetry import FIRST_TOKEN_S
from common.request_plane.step_sums import RankStatus
from frontend.http.operator.history import Queue
from frontend.processes import Siblings
from frontend.router import Router, TargetLoad
from frontend.workers import (
    Departure,
    Departures,
    Fleet,
    Fleets,
    MediaSender,
    Member,
    Refusals,
)


class ShareView(BaseModel):
    """Load on a rank: requests, tokens to prefill, and prompt tokens of decoding requests."""

    requests: int
    prefill_tokens: int
    decode_tokens: int


class RankView(BaseModel):
    """The router's knowledge of one rank.

    Attributes:
        busy: too loaded for new requests.
        index: knowledge of its cache: exact, degraded or approximate.
        reason: why the index is not exact, and how much is known meanwhile.
        blocks: held by the rank, according to the events applied so far.
        own: load by this frontend.
        others: load by other frontends, as last reported.
        running, waiting, kv_usage: of its engine, as last reported; None before the first report.
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


class SummaryView(BaseModel):
    """The frontend itself.

    Attributes:
        version: its own, and vLLM's.
        mode: how it chooses workers.
        models: the first name of each.
        started, now: start and clock of this process, in seconds since the epoch.
        first_token_edges_s: of ``first_token_within`` in the history.
    """

    host: str
    version: str
    mode: str
    models: list[str]
    processes: int
    started: float
    now: float
    first_token_edges_s: tuple[float, ...] = FIRST_TOKEN_S


class ProcessView(BaseModel):
    """A worker as one process of the frontend sees it; the fields are those of WorkerView."""

    process: str
    connected: bool
    transport: str | None
    circuit: str
    active_requests: int


class AdapterView(BaseModel):
    """A LoRA adapter; ``active`` ones were used last, as many as the engine runs at once."""

    name: str
    path: str
    active: bool


class WorkerView(BaseModel):
    """One worker with a card that fits, or that was lost or left within the last hour.

    Of several processes, ``connected`` means all, ``circuit`` and ``ranks`` show the worst,
    ``media`` is the maximum and ``active_requests`` the sum.

    Attributes:
        model: the first of its served names.
        state: of its card; without one ``lost``, or ``left`` after a shutdown.
        gone_at, gone_reason: when (seconds since the epoch) and why its link was lost.
        transport: how media travel to it; None while it is not connected.
        circuit: closed, open or half-open; errors and stalls open it for a while.
        circuit_reason: why it is not closed.
        ejected_for_s: how long it stays open, as far as is known.
        drained: by an operator, in some process, which sends it no requests.
        condition: serving, paused or asleep, as last reported; None before the first report. Only a
            serving worker gets requests.
        media: items that it holds, as far as this frontend knows.
        active_requests: of this frontend.
        running, waiting, hf_processor_runs: of all ranks, and kv_usage of the fullest, as last
            reported; None before the first report.
        adapters: on its card, or loaded since.
        processes: only where there are several.
    """

    worker_id: WorkerId
    incarnation: str
    model: str = ""
    state: str
    connected: bool
    gone_at: float | None = None
    gone_reason: str = ""
    request_endpoint: str
    transport: str | None = None
    circuit: str = "closed"
    circuit_reason: str = ""
    ejected_for_s: float = 0.0
    drained: bool = False
    condition: str | None = None
    ranks: list[RankView] = []
    media: int = 0
    active_requests: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    hf_processor_runs: int | None = None
    adapters: list[AdapterView] = []
    processes: list[ProcessView] = []


class RefusedView(BaseModel):
    """A worker whose card does not fit, and why."""

    worker_id: WorkerId
    reason: str


def _reports(member: Member) -> list[RankStatus]:
    return [] if member.status is None else member.status.ranks


def queues(fleets: Fleets) -> dict[str, Queue]:
    return {
        member.card.worker_id: Queue(
            sum(one.running for one in _reports(member)),
            sum(one.waiting for one in _reports(member)),
        )
        for member in fleets.available()
    }


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


def _departed(one: Departure) -> WorkerView:
    return WorkerView(
        worker_id=one.run.worker_id,
        incarnation=one.run.incarnation,
        model=one.model,
        state="left" if one.left else "lost",
        connected=False,
        gone_at=one.at,
        gone_reason=one.reason,
        request_endpoint=one.request_endpoint,
    )


@dataclass
class Status:
    """This process's knowledge of all fleets and of rejected workers."""

    fleets: Iterable[Fleet]
    media_sender: MediaSender
    refusals: Refusals = field(default_factory=Refusals)
    mode: str = ""
    departures: Departures = field(default_factory=Departures)
    started: float = field(default_factory=time.time)

    def workers(self) -> list[WorkerView]:
        return [
            *(
                self._view(fleet.router, member)
                for fleet in self.fleets
                for member in fleet.members.shown()
            ),
            *map(_departed, self.departures.recent()),
        ]

    def refused(self) -> list[RefusedView]:
        return [
            RefusedView(worker_id=worker_id, reason=reason)
            for worker_id, reason in self.refusals.by_worker().items()
        ]

    def decisions(self, wanted: "Wanted") -> list[dict[str, Any]]:
        """Return the routing decisions of one response, or the last ones, newest first."""
        logs = [fleet.router.decisions for fleet in self.fleets]
        if wanted.request_id is not None:
            found = [each for log in logs for each in log.find(wanted.request_id)]
            return [each.as_json(wanted.candidates) for each in found]
        found = [each for log in logs for each in log.last(wanted.last)]
        if len(logs) > 1:
            found.sort(key=lambda decision: decision.time, reverse=True)
        return [decision.as_json(wanted.candidates) for decision in found[: wanted.last]]

    def summary(self, processes: int) -> SummaryView:
        return SummaryView(
            host=gethostname(),
            version=version_line(),
            mode=self.mode,
            models=[fleet.names[0] for fleet in self.fleets if fleet.names],
            processes=processes,
            started=self.started,
            now=time.time(),
        )

    def _view(self, router: Router, member: Member) -> WorkerView:
        card, link, status = member.card, member.link, member.status
        circuit, circuit_reason = router.ejection.circuit(card.worker_id)
        return WorkerView(
            worker_id=card.worker_id,
            incarnation=card.incarnation,
            model=card.served_model_names[0],
            state=card.state,
            connected=link is not None,
            gone_at=member.gone and member.gone.at,
            gone_reason=member.gone.reason if member.gone else "",
            request_endpoint=card.request_endpoint,
            transport=self.media_sender.transport(card.worker_id),
            circuit=circuit,
            circuit_reason=circuit_reason,
            ejected_for_s=router.ejection.remaining_s(card.worker_id),
            drained=router.drained.get(card.worker_id) == card.incarnation,
            condition=None if status is None else status.condition,
            ranks=[_rank_view(router, member, rank) for rank in card.ranks],
            media=router.media.count(card.worker_id),
            active_requests=0 if link is None else link.active_requests,
            running=None if status is None else sum(one.running for one in status.ranks),
            waiting=None if status is None else sum(one.waiting for one in status.ranks),
            kv_usage=None if status is None else max(one.kv_usage for one in status.ranks),
            hf_processor_runs=None if status is None else status.hf_processor_runs,
            adapters=[
                AdapterView(
                    name=each.name, path=each.path, active=each.name in member.active_adapters
                )
                for each in member.adapters
            ],
        )


class Wanted(msgspec.Struct, frozen=True):
    """Decisions of a request id, or the last; the cheapest ``candidates`` and the chosen one."""

    request_id: str | None
    last: int
    candidates: int | None = None


_workers = TypeAdapter(list[WorkerView])
_refused = TypeAdapter(list[RefusedView])


class FleetStatus:
    """Status of all processes of this frontend, merged."""

    def __init__(self, own: Status, siblings: Siblings | None) -> None:
        self._own = own
        self._siblings = siblings
        if siblings is not None:
            siblings.tell("workers", lambda _: _workers.dump_json(own.workers()))
            siblings.tell("refused", lambda _: _refused.dump_json(own.refused()))
            siblings.tell("events", lambda _: msgspec.json.encode(recent()))
            wanted = msgspec.json.Decoder(Wanted)
            siblings.tell(
                "decisions", lambda said: msgspec.json.encode(own.decisions(wanted.decode(said)))
            )

    async def workers(self) -> list[WorkerView]:
        if self._siblings is None:
            return without_namesakes(self._own.workers())
        told = {self._siblings.name: self._own.workers()}
        for name, body in (await self._siblings.ask("workers")).items():
            told[name] = _workers.validate_json(body)
        return without_namesakes(merged_workers(told))

    async def refused(self) -> list[RefusedView]:
        found = self._own.refused()
        if self._siblings is not None:
            for body in (await self._siblings.ask("refused")).values():
                found += [each for each in _refused.validate_json(body) if each not in found]
        return found

    def summary(self) -> SummaryView:
        return self._own.summary(1 if self._siblings is None else self._siblings.count)

    async def events(self) -> list[dict[str, Any]]:
        """Return the last events, newest first, each with its process if there are several."""
        found = [msgspec.to_builtins(each) for each in recent()]
        if self._siblings is not None:
            found = [one | {"process": self._siblings.name} for one in found]
            for name, body in (await self._siblings.ask("events")).items():
                found += [one | {"process": name} for one in msgspec.json.decode(body)]
        return sorted(found, key=lambda each: -each["at"])

    async def decisions(self, wanted: Wanted) -> list[dict[str, Any]]:
        """Return routing decisions, each with its process if there are several."""
        found = self._own.decisions(wanted)
        if self._siblings is None:
            return found
        for each in found:
            each["process"] = self._siblings.name
        told = await self._siblings.ask("decisions", msgspec.json.encode(wanted))
        for name, body in told.items():
            found += [each | {"process": name} for each in msgspec.json.decode(body)]
        oldest_first = wanted.request_id is not None
        found.sort(key=lambda each: each["time"], reverse=not oldest_first)
        return found if oldest_first else found[: wanted.last]


_CIRCUITS = ("closed", "half-open", "open")
_KNOWLEDGE = ("exact", "degraded", "approximate")


def merged_workers(told: dict[str, list[WorkerView]]) -> list[WorkerView]:
    """Merge the processes' views of each worker; the first process is the one that was asked."""
    by_worker: dict[tuple[str, str], dict[str, WorkerView]] = {}
    for name, views in told.items():
        for view in views:
            by_worker.setdefault((view.worker_id, view.incarnation), {})[name] = view
    return [_merged(views, len(told)) for views in by_worker.values()]


def without_namesakes(views: list[WorkerView]) -> list[WorkerView]:
    """Leave out departed incarnations of workers that have come back."""
    there = {view.worker_id for view in views if view.ranks}
    return [view for view in views if view.ranks or view.worker_id not in there]


def _merged(views: dict[str, WorkerView], processes: int) -> WorkerView:
    gone = next((view for view in views.values() if view.gone_at is not None), None)
    views = {name: view for name, view in views.items() if view.ranks} or views
    each = list(views.values())
    worst = max(each, key=lambda view: _CIRCUITS.index(view.circuit))
    reports = [view for view in each if view.running is not None]
    return (reports or each)[0].model_copy(
        update={
            "connected": len(each) == processes and all(view.connected for view in each),
            "gone_at": gone and gone.gone_at,
            "gone_reason": gone.gone_reason if gone else "",
            "transport": next((view.transport for view in each if view.transport), None),
            "circuit": worst.circuit,
            "circuit_reason": worst.circuit_reason,
            "ejected_for_s": worst.ejected_for_s,
            "drained": any(view.drained for view in each),
            "ranks": [
                _merged_rank(ranks) for ranks in zip(*(view.ranks for view in each), strict=True)
            ],
            "media": max(view.media for view in each),
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
    """Merge one rank. The worker counts siblings as other frontends, so subtract their ``own``."""
    worst = max(ranks, key=lambda rank: _KNOWLEDGE.index(rank.index))
    own = [rank.own for rank in ranks]
    ours, rest = _sum(own), _sum([one for one in own if one is not worst.own])
    busy = any(rank.busy for rank in ranks)
    others = _sum([worst.others, rest], sign=-1)
    return worst.model_copy(update={"busy": busy, "own": ours, "others": others})


def _sum(shares: list[ShareView], sign: int = 1) -> ShareView:
    """Add all shares to the first, or subtract them from it, down to 0 at most."""
    total = ShareView(requests=0, prefill_tokens=0, decode_tokens=0)
    for position, one in enumerate(shares):
        factor = sign if position else 1
        total = ShareView(
            requests=max(0, total.requests + factor * one.requests),
            prefill_tokens=max(0, total.prefill_tokens + factor * one.prefill_tokens),
            decode_tokens=max(0, total.decode_tokens + factor * one.decode_tokens),
        )
    return total


def status_routes(status: FleetStatus, *, several: bool) -> APIRouter:
    """Return the routes under ``/mmrouter``; views of processes are shown if there are several."""
    api = APIRouter(prefix="/mmrouter", tags=["mmrouter"])
    hidden = None if several else {"__all__": {"processes"}}

    @api.get("/workers", response_model_exclude=hidden)
    async def workers() -> list[WorkerView]:
        """Workers whose cards fit, and those that were lost or left within the last hour."""
        return await status.workers()

    @api.get("/workers/refused")
    async def refused() -> list[RefusedView]:
        """Workers whose cards don't fit."""
        return await status.refused()

    @api.get("/summary")
    async def summary() -> SummaryView:
        """Version, models and start of this frontend."""
        return status.summary()

    @api.get("/events")
    async def events(last: int = Query(1000, ge=1)) -> list[dict[str, Any]]:
        """Events of workers (joined, lost, removed, refused, ejected, drained), newest first."""
        return (await status.events())[:last]

    @api.get("/decisions")
    async def decisions(
        request_id: str | None = Query(None, description="id of a response of the API"),
        last: int = Query(50, ge=1, le=1000),
        candidates: int | None = Query(None, ge=0, description="of each, the cheapest"),
    ) -> list[dict[str, Any]]:
        """Routing decisions of one response, or the last ones, newest first.

        Clients may choose ids, so several responses may have the same id.
        """
        return await status.decisions(Wanted(request_id, last, candidates))

    return api

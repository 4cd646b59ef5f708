"""Operations of workers' engines over HTTP, for admins, under ``/mmrouter/workers``."""

from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from common.identity import WorkerId
from common.request_plane.operations import Operation, Outcome, name_of
from frontend.http.operator.operation_queries import READS, Read, refuse_unknown
from frontend.http.operator.vllm_routes import PROFILER, REFUSED
from frontend.workers import Performed, Roll, perform, those_called

LONG_S: Final = 600.0
"""Default time-out of one worker, in seconds."""


class Answer(BaseModel):
    operation: str
    workers: list[Performed]


class Operating:
    def __init__(self, members: Roll) -> None:
        self._members = members

    async def perform(
        self,
        operation: Operation,
        worker_id: WorkerId | None,
        timeout_s: float,
        model: str | None = None,
    ) -> Answer:
        """Operate one worker, or all (of a model). Raises HTTPException (404, 503) without any."""
        called = [
            member
            for member in those_called(self._members, worker_id)
            if model is None or model in member.card.served_model_names
        ]
        if not called and worker_id is not None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no worker {worker_id!r}")
        if not called:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "there is no worker")
        done = await perform(called, operation, timeout_s)
        return Answer(operation=name_of(operation), workers=done)

    def models(self) -> list[str]:
        """Return the first name of each model that workers serve."""
        shown = self._members.shown()
        return list(dict.fromkeys(member.card.served_model_names[0] for member in shown))

    def serves(self, model: str) -> bool:
        """Return whether a worker serves its model under a name."""
        return any(model in one.card.served_model_names for one in self._members.shown())


def status_of(parts: Iterable[Performed]) -> HTTPStatus:
    """Return 200 if all did it, 502 if one failed or did not answer, 409 if one refused."""
    outcomes = {part.outcome for part in parts}
    if Outcome.FAILED in outcomes:
        return HTTPStatus.BAD_GATEWAY
    return HTTPStatus.CONFLICT if Outcome.REFUSED in outcomes else HTTPStatus.OK


def operate_routes(operating: Operating, forget_media: Callable[[], Awaitable[None]]) -> APIRouter:
    """Return the routes under ``/mmrouter/workers``; ``forget_media`` clears our media cache."""
    api = APIRouter(prefix="/mmrouter/workers", tags=["mmrouter"])
    for name, read in READS.items():
        one, each = _acts(operating, read, forget_media if name == "reset_mm_cache" else None)
        for path, act in ((f"/{name}", each), (f"/{{worker_id}}/{name}", one)):
            api.add_api_route(path, act, methods=["POST"], response_model=Answer)
    return api


def vllms_routes(operating: Operating) -> APIRouter:
    """Return vLLM's engine routes: the profiler's, which vLLM's benchmark calls, and 501s."""
    api = APIRouter(tags=["vLLM"])
    for path in PROFILER:
        _, act = _acts(operating, READS[path.removeprefix("/")])
        api.add_api_route(path, act, methods=["POST"], response_model=Answer)
    for path, reason in REFUSED.items():
        refuse = _say(HTTPStatus.NOT_IMPLEMENTED, f"{path} does nothing here: {reason}")
        api.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)
    return api


_Act = Callable[..., Awaitable[Response]]


def _acts(
    operating: Operating, read: Read, first: Callable[[], Awaitable[None]] | None = None
) -> tuple[_Act, _Act]:
    """Return the handlers for one worker and for all; the latter awaits ``first`` before."""
    timeout = Annotated[float, Query(gt=0, le=86400, description="seconds for each worker")]

    async def one(
        request: Request,
        worker_id: str,
        operation: Annotated[Operation, Depends(read)],
        timeout_s: timeout = LONG_S,
    ) -> Response:
        refuse_unknown(request, read, "timeout_s")
        done = await operating.perform(operation, WorkerId(worker_id), timeout_s)
        return JSONResponse(done.model_dump(mode="json"), status_of(done.workers))

    async def each(
        request: Request,
        operation: Annotated[Operation, Depends(read)],
        timeout_s: timeout = LONG_S,
    ) -> Response:
        refuse_unknown(request, read, "timeout_s")
        if first is not None:
            await first()
        done = await operating.perform(operation, None, timeout_s)
        return JSONResponse(done.model_dump(mode="json"), status_of(done.workers))

    return one, each


def _say(status: HTTPStatus, sentence: str) -> _Act:
    async def say() -> Response:
        raise HTTPException(status, sentence)

    return say

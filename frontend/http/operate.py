"""Operations of workers' engines over HTTP, for admins: of one worker or of all, under
``/mmrouter/workers`` and under vLLM's own names at the root.
"""

from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from common.identity import WorkerId
from common.operations import Condition, Operation, Outcome, Sleep, WakeUp, name_of
from frontend.http.operation_queries import READS, VLLMS, Read, refuse_unknown
from frontend.http.vllm_routes import ADAPTERS, OPERATIONS, REFUSED
from frontend.workers import Performed, Roll, perform, those_called

LONG_S: Final = 600.0
"""How long a worker may take unless the operator says otherwise."""

_NOT_HERE: Final = "{path} is here with VLLM_SERVER_DEV_MODE=1, as in vLLM; without, {instead}"


class Part(BaseModel):
    """What became of an operation at one worker.

    Attributes:
        outcome: done, refused (nothing was done) or failed.
        message: why it was not done; empty if it was.
        seconds: that it took.
    """

    worker_id: WorkerId
    incarnation: str
    outcome: Outcome
    message: str
    seconds: float


class Answer(BaseModel):
    """What became of an operation."""

    operation: str
    workers: list[Part]


class Operating:
    """Has workers do something.

    Args:
        members: who is there.
    """

    def __init__(self, members: Roll) -> None:
        self._members = members

    async def perform(
        self,
        operation: Operation,
        worker_id: WorkerId | None,
        timeout_s: float,
        model: str | None = None,
    ) -> Answer:
        """Have the worker of an id do it, or all without one; says what became of it.

        Args:
            model: a name; then only workers that serve it under that do it.

        Raises:
            HTTPException: there is no such worker, or none at all.
        """
        called = [
            member
            for member in those_called(self._members, worker_id)
            if model is None or model in member.card.served_model_names
        ]
        if not called and worker_id is not None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no worker {worker_id!r}")
        if not called:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "there is no worker")
        parts = [_part(one) for one in await perform(called, operation, timeout_s)]
        return Answer(operation=name_of(operation), workers=parts)

    def models(self) -> list[str]:
        """The first name of each model that workers serve."""
        shown = self._members.shown()
        return list(dict.fromkeys(member.card.served_model_names[0] for member in shown))

    def serves(self, model: str) -> bool:
        """Whether some worker serves its model under a name."""
        return any(model in one.card.served_model_names for one in self._members.shown())

    def conditions(self) -> dict[str, Condition | None]:
        """What each worker reported last; None before its first report."""
        return {
            member.card.worker_id: None if member.status is None else member.status.condition
            for member in self._members.shown()
        }


def status_of(parts: Iterable[Part]) -> HTTPStatus:
    """200 if all did it; 502 if one failed on it or did not answer; 409 if one refused it."""
    outcomes = {part.outcome for part in parts}
    if Outcome.FAILED in outcomes:
        return HTTPStatus.BAD_GATEWAY
    return HTTPStatus.CONFLICT if Outcome.REFUSED in outcomes else HTTPStatus.OK


def operate_routes(operating: Operating) -> APIRouter:
    """The routes under ``/mmrouter/workers``."""
    api = APIRouter(prefix="/mmrouter/workers", tags=["mmrouter"])
    for name, read in READS.items():
        one, each = _acts(operating, read)
        for path, act in ((f"/{name}", each), (f"/{{worker_id}}/{name}", one)):
            api.add_api_route(path, act, methods=["POST"], response_model=Answer)
    return api


def vllms_routes(
    operating: Operating,
    forget_media: Callable[[], Awaitable[None]],
    *,
    dev_mode: bool,
) -> APIRouter:
    """vLLM's own routes that concern engines, at the root: those that workers carry out, and a
    sentence for the others.

    Args:
        forget_media: lets the frontend forget those that it processed.
        dev_mode: whether vLLM's server would have them.
    """
    api = APIRouter(tags=["vLLM"])
    for name, read in VLLMS.items():
        act = _vllms_act(operating, read, forget_media if name == "reset_mm_cache" else None)
        if not (dev_mode or name in ("start_profile", "stop_profile")):
            act = _say(HTTPStatus.NOT_FOUND, _not_here(name, f"POST /mmrouter/workers/{name} does"))
        api.add_api_route(f"/{name}", act, methods=["POST"])
    for name, rests in (
        ("is_sleeping", {Condition.ASLEEP}),
        ("is_paused", {Condition.ASLEEP, Condition.PAUSED}),
    ):
        tell = _tell(operating, name, rests)
        if not dev_mode:
            tell = _say(HTTPStatus.NOT_FOUND, _not_here(name, "GET /mmrouter/workers says it"))
        api.add_api_route(f"/{name}", tell, methods=["GET"])
    for path, reason in REFUSED.items():
        refuse = _say(HTTPStatus.NOT_IMPLEMENTED, f"{path} does nothing here: {reason}")
        api.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)
    return api


REPLACED: Final = OPERATIONS | ADAPTERS | REFUSED.keys()
"""Paths of vLLM's app that are ours."""

_Act = Callable[..., Awaitable[Response]]


def _acts(operating: Operating, read: Read) -> tuple[_Act, _Act]:
    """Of one worker, and of all."""
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
        done = await operating.perform(operation, None, timeout_s)
        return JSONResponse(done.model_dump(mode="json"), status_of(done.workers))

    return one, each


def _vllms_act(
    operating: Operating, read: Read, first: Callable[[], Awaitable[None]] | None
) -> _Act:
    async def act(request: Request, operation: Annotated[Operation, Depends(read)]) -> Response:
        refuse_unknown(request, read)
        if first is not None:
            await first()
        done = await operating.perform(operation, None, LONG_S)
        status = status_of(done.workers)
        body = _vllms_words(operation, operating, well=status is HTTPStatus.OK)
        return JSONResponse(body | done.model_dump(mode="json"), status)

    return act


def _vllms_words(operation: Operation, operating: Operating, *, well: bool) -> dict[str, Any]:
    """What vLLM's server answers, to go before what each worker did."""
    name = name_of(operation)
    if name == "reset_prefix_cache":
        return {"success": well}
    if not well:
        return {"error": f"not all workers did {name}"}
    match operation:
        case Sleep(level):
            return {"status": "sleeping", "level": level}
        case WakeUp(tags):
            asleep = Condition.ASLEEP in operating.conditions().values()
            return {"status": "sleeping" if asleep else "awake", "tags": tags}
    words = {
        "pause": "paused", "resume": "resumed", "release_kv_cache_memory": "kv_cache_released"
    }  # fmt: skip
    return {"status": words[name]} if name in words else {}


def _tell(operating: Operating, name: str, rests: set[Condition]) -> _Act:
    async def tell() -> Response:
        workers = {one: said in rests for one, said in operating.conditions().items()}
        return JSONResponse({name: bool(workers) and all(workers.values()), "workers": workers})

    return tell


def _say(status: HTTPStatus, sentence: str) -> _Act:
    async def say() -> Response:
        raise HTTPException(status, sentence)

    return say


def _not_here(name: str, instead: str) -> str:
    return _NOT_HERE.format(path=f"/{name}", instead=f"{instead}")


def _part(done: Performed) -> Part:
    return Part(
        worker_id=done.worker_id,
        incarnation=done.incarnation,
        outcome=done.outcome,
        message=done.message,
        seconds=done.seconds,
    )

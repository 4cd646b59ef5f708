"""vLLM's routes to load and unload LoRA adapters, at all workers of a model."""

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, HTTPException
from fastapi.responses import PlainTextResponse, Response
from pydantic import ConfigDict
from vllm.exceptions import LoRAAdapterNotFoundError

from common.request_plane.operations import (
    LoadLoraAdapter,
    Outcome,
    UnloadLoraAdapter,
    has_adapter_already,
    has_no_adapter,
    has_the_models_name,
)
from frontend.asgi import error_answer
from frontend.http.operator.operate import LONG_S, Operating, status_of
from frontend.http.operator.operation_queries import Loading, Unloading
from frontend.workers import Performed

_HIDDEN: Final = (
    "/v1/{name} is here with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, as in vLLM; without, POST "
    "/mmrouter/workers/{name} does it"
)

_INVALID: Final = "InvalidUserInput"
_NOT_FOUND: Final = "NotFoundError"
"""vLLM's names of these errors."""


class LoadingAtAll(Loading):
    """vLLM's body, and the ``model`` where there are several. Other fields are ignored, as by
    vLLM's server: the LoRA syncer of Kubernetes' inference gateway sends ``base_model_name``.
    """

    model_config = ConfigDict(extra="ignore")

    model: str | None = None


class UnloadingAtAll(Unloading):
    """Likewise. ``lora_int_id`` is ignored too, as by vLLM's server: each worker has its own."""

    model_config = ConfigDict(extra="ignore")

    lora_int_id: int | None = None
    model: str | None = None


def adapter_routes(operating: Operating, *, allowed: bool) -> APIRouter:
    """Return the admins' routes. Unless ``allowed``, as by vLLM's server, they answer 404."""
    api = APIRouter(prefix="/v1", tags=["vLLM"])

    async def load_lora_adapter(adapter: LoadingAtAll) -> Response:
        wanted = LoadLoraAdapter(**adapter.model_dump(exclude={"model"}))
        return await _perform(operating, wanted, adapter.model, "added")

    async def unload_lora_adapter(adapter: UnloadingAtAll) -> Response:
        wanted = UnloadLoraAdapter(adapter.lora_name)
        return await _perform(operating, wanted, adapter.model, "removed")

    for act in (load_lora_adapter, unload_lora_adapter):
        name = act.__name__
        api.add_api_route(f"/{name}", act if allowed else _hide(name), methods=["POST"])
    return api


def _hide(name: str) -> Callable[[], Awaitable[Response]]:
    async def hidden() -> Response:
        raise HTTPException(HTTPStatus.NOT_FOUND, _HIDDEN.format(name=name))

    return hidden


async def _perform(
    operating: Operating,
    operation: LoadLoraAdapter | UnloadLoraAdapter,
    model: str | None,
    done: str,
) -> Response:
    """Answer in vLLM's words if all workers agree, else list each failed worker's reason."""
    models = operating.models()
    if model is None and len(models) > 1:
        names = ", ".join(models)
        message = f"several models are served here, so `model` must name one of them: {names}"
        return error_answer(message, HTTPStatus.BAD_REQUEST)
    if model is not None and not operating.serves(model):
        return error_answer(f"The model `{model}` does not exist.", HTTPStatus.NOT_FOUND)
    parts = (await operating.perform(operation, None, LONG_S, model)).workers
    if (answer := _as_by_vllm(operation, parts)) is not None:
        return answer
    if missing := [part for part in parts if part.outcome is not Outcome.DONE]:
        words = "; ".join(f"worker {part.worker_id}: {part.message}" for part in missing)
        message = f"{len(missing)} of {len(parts)} workers have not done it: {words}"
        return error_answer(message, status_of(parts))
    return PlainTextResponse(f"Success: LoRA adapter '{operation.lora_name}' {done} successfully.")


def _as_by_vllm(
    operation: LoadLoraAdapter | UnloadLoraAdapter, parts: Sequence[Performed]
) -> Response | None:
    """Return vLLM's answer to a reason that all workers share, if it has one."""
    name = operation.lora_name
    if isinstance(operation, UnloadLoraAdapter):
        if all(part.message == has_no_adapter(name) for part in parts):
            message = f"The lora adapter '{name}' cannot be found."
            return error_answer(message, HTTPStatus.NOT_FOUND, kind=_NOT_FOUND)
        return None
    not_there = str(LoRAAdapterNotFoundError(name, operation.lora_path))
    if all(not_there in part.message for part in parts):
        return error_answer(not_there, HTTPStatus.NOT_FOUND, kind=_NOT_FOUND)
    wrong = {
        has_the_models_name(name): "conflicts with a served base model.",
        has_adapter_already(name): (
            "has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True."
        ),
    }
    for reason, words in wrong.items():
        if all(part.message == reason for part in parts):
            message = f"The lora adapter '{name}' {words}"
            return error_answer(message, HTTPStatus.BAD_REQUEST, kind=_INVALID)
    return None

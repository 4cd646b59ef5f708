"""The only file that touches vLLM's server assembly: its OpenAI app around our client."""

import asyncio
import logging
import re
import traceback
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from importlib import import_module
from typing import Any, Final, TypeAlias

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware
from vllm.exceptions import VLLMError
from vllm.tasks import SupportedTask

from common.cli.vllm_command_line import adopt_servers_lines
from common.errors import (
    ConfigurationError,
    MmRouterError,
    OutOfFilesError,
    OverloadedError,
    ThreadStuckError,
    causes,
)
from common.vllm_compat.renderer_patches import free_media_of_messages
from frontend.asgi import LACKING, App, as_vllm_error, error_answer, overload_answer
from frontend.gate import fail_fast, take_parsed_bodies
from frontend.http.limits import content_parts
from frontend.http.limits.connection import HeadLimits, connections
from frontend.http.operator.operate import Operating, vllms_routes
from frontend.http.operator.vllm_routes import REPLACED
from frontend.http.server.adapter_routes import adapter_routes
from frontend.http.server.not_found import (
    STORED,
    look_up_models,
    look_up_responses,
    replace_route,
    say_what_there_is,
)
from frontend.http.server.serving_threads import tokenize_harmony_aside
from frontend.http.server.tools import say_where_tool_flags_go
from frontend.http.settings import HttpSettings
from frontend.http.streaming.merging import merge_in_linear_time
from frontend.http.streaming.parsing import derender_aside
from frontend.http.streaming.stream_errors import say_errors
from frontend.http.streaming.token_streams import own_streams
from frontend.workers import Adapters

logger = logging.getLogger(__name__)

MODELS: Final = "/v1/models"

KEEP_ALIVE_S: Final = 75
"""Seconds that a connection may be idle. The client or the balancer must close first (most after 60
s): a POST on a closing connection fails. vLLM's own 5 s are shorter than what clients use."""

Handler: TypeAlias = Callable[[Request, Exception], Awaitable[Response]]

_READS_REQUESTS = re.compile(
    r"/vllm/(entrypoints/.*protocol\.py|renderers/online_renderer\.py"
    r"|entrypoints/serve/engine/serving\.py:_get_message_types$)"
)
_OF_THE_SERVER = re.compile(r"/vllm/entrypoints/")


async def build_vllm_app(
    client: EngineClient,
    args: Namespace,
    tasks: tuple[SupportedTask, ...],
    server: uvicorn.Server,
) -> FastAPI:
    """Return vLLM's own app, whose lifespan still has to be entered. vLLM raises KeyError for a
    reasoning parser of the workers' that doesn't exist here.
    """
    validate_api_server_args(args)
    fail_fast()
    # In a thread, since other models may be served meanwhile: it takes seconds.
    app = await asyncio.to_thread(asyncio.run, _assembled(client, args, tasks))
    app.state.server = server  # read by vLLM's error handlers
    take_parsed_bodies()
    content_parts.install()
    free_media_of_messages()
    merge_in_linear_time()
    own_streams(app)
    derender_aside(app)
    say_errors(app)
    say_where_tool_flags_go(app)
    tokenize_harmony_aside(app)
    _handle_errors(app)
    _drop_doubles(app)
    _count_together(app)
    _add_lookups(app)
    decode_for_decisions(app)
    return app


def decode_for_decisions(app: FastAPI) -> None:
    """Decode media of decisions when they are fetched, where vLLM shrinks pictures, here in a
    thread, or looks for the sound of films. Elsewhere they stay deferred, since each question would
    hash a decoded picture.
    """
    for serving in vars(app.state)["_state"].values():
        strategy: Any = getattr(serving, "strategy", None)
        limit = getattr(strategy, "max_image_pixels", 0)
        if limit is not None and getattr(strategy, "modalities", None):
            strategy._connector.defers = False
            if limit:
                shrink = import_module(type(strategy).__module__).cap_pixels
                strategy._connector.then = partial(shrink, max_pixels=limit)
                strategy.max_image_pixels = None


def _add_lookups(app: FastAPI) -> None:
    async def listing() -> dict[str, Any]:
        cards: dict[str, Any] = (await models.show_available_models()).model_dump()
        return cards

    models = app.state.openai_serving_models
    look_up_models(app, listing)
    if any(getattr(route, "path", "") in STORED for route in app.routes):
        look_up_responses(app)


async def _assembled(
    client: EngineClient, args: Namespace, tasks: tuple[SupportedTask, ...]
) -> FastAPI:
    named = [*tasks]  # as vLLM's engine names them, since errors quote the list
    app = build_app(args, named, client.model_config)
    await init_app_state(client, app.state, args, named)
    return app


_FOR_ALL_ANSWERS: Final = (CORSMiddleware, XRequestIdMiddleware)
"""Layers of vLLM's app whose headers this server sets on all answers, also on rejections."""


def _drop_doubles(app: FastAPI) -> None:
    """Remove these layers. One behind an opaque ``--middleware`` stays: headers are replaced."""
    layer: Any = app.middleware_stack
    while (inner := getattr(layer, "app", None)) is not None:
        if isinstance(inner, _FOR_ALL_ANSWERS):
            layer.app = inner.app
        else:
            layer = inner


_http_metrics: Final[list[Any]] = []
"""Request metrics of the first app of this process."""


def _count_together(app: FastAPI) -> None:
    """Share the first app's metrics: a process can have a metric of a name only once."""
    layer: Any = app.middleware_stack
    while not hasattr(layer, "instrumentations"):
        layer = getattr(layer, "app", None)
        if layer is None:
            return
    if layer.instrumentations:
        _http_metrics[:] = layer.instrumentations
    layer.instrumentations = list(_http_metrics)


def list_together(app: FastAPI, apps: Callable[[], Iterable[FastAPI]]) -> None:
    """Have an app list the models of all apps. Models precede adapters of the same name."""

    async def listing() -> dict[str, Any]:
        listings = [
            (await each.state.openai_serving_models.show_available_models()).model_dump()
            for each in list(apps()) or [app]  # the last one was unloaded meanwhile
        ]
        named: dict[str, dict[str, Any]] = {}
        for card in (card for each in listings for card in each["data"]):
            known = named.get(card["id"])
            if known is None or (known["parent"] and not card["parent"]):  # adapters have one
                named[card["id"]] = card
        return listings[0] | {"data": list(named.values())}

    async def models() -> JSONResponse:
        return JSONResponse(await listing())

    own = app.state.openai_serving_models
    own.base_model_paths = _Names(own.base_model_paths, apps)
    replace_route(app, MODELS, models, "GET")
    look_up_models(app, listing)


def share_adapters(app: FastAPI, adapters: Adapters) -> None:
    """Let vLLM's server list the workers' adapters, and accept their names."""
    models = app.state.openai_serving_models
    adapters.reserve(model.name for model in models.base_model_paths)
    models.lora_requests = adapters.requests


class _Names(Sequence[Any]):
    """Names of all models, for vLLM's 404, an app's own first. Ownership is checked elsewhere."""

    def __init__(self, own: Sequence[Any], apps: Callable[[], Iterable[FastAPI]]) -> None:
        self._own = own
        self._apps = apps

    def __getitem__(self, index: Any) -> Any:
        listings = (each.state.openai_serving_models.base_model_paths for each in self._apps())
        others = [names._own for names in listings if names is not self]
        return [*self._own, *(path for each in others for path in each)][index]

    def __len__(self) -> int:
        return len(self[:])


def replace_engine_routes(app: FastAPI, operating: Operating) -> None:
    """Replace vLLM's routes that concern an engine with ours, which concern all workers."""
    kept = [route for route in app.router.routes if getattr(route, "path", "") not in REPLACED]
    app.router.routes[:] = kept
    app.include_router(vllms_routes(operating))
    allowed = envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING
    app.include_router(adapter_routes(operating, allowed=allowed))


def _handle_errors(app: FastAPI) -> None:
    """Register our error handlers, which forget each error once it is answered.

    They go into the assembled app, since vLLM's SageMaker support assembles it early. A second
    assembly would duplicate the middleware, and the second one for metrics counts nothing.
    """
    ours: dict[Any, Any] = {
        OverloadedError: _say_when,
        VLLMError: _say_when,
        ThreadStuckError: _as_vllms,
        HTTPException: say_what_there_is,
        Exception: _blame_the_request,
    }
    if app.middleware_stack is None:
        app.middleware_stack = app.build_middleware_stack()
    layer: Any = app.middleware_stack
    while not isinstance(layer, ExceptionMiddleware):
        layer = layer.app
    handlers: dict[Any, Any] = app.exception_handlers | ours
    for kind, handler in handlers.items():
        layer.add_exception_handler(kind, _forgetting(handler))


def _forgetting(handler: Handler) -> Handler:
    """Wrap a handler to answer 503 for a lack of files (of modules, for a first answer), threads or
    memory, and to release what the failed request held, above all media in the arena.

    vLLM's routes keep the failed task in a local variable, so error and variables hold each other
    until garbage collection.
    """

    async def handle(request: Request, error: Exception) -> Response:
        try:
            # FastAPI answers 400 for a body that it can't read, whatever the cause.
            cause = (isinstance(error, HTTPException) and error.__cause__) or error
            if OutOfFilesError.caused(cause):
                logger.warning(LACKING, cause)
                return overload_answer(OutOfFilesError())
            return await handler(request, error)
        finally:
            for each in causes(error):
                traceback.clear_frames(each.__traceback__)

    return handle


async def _say_when(request: Request, error: Exception) -> Response:
    """Answer as vLLM does, except to an overload: that answer has a ``Retry-After``."""
    overload = error if isinstance(error, OverloadedError) else error.__cause__
    if isinstance(overload, OverloadedError):
        return overload_answer(overload)
    return await vllm_error_handler(request, error)


async def _as_vllms(request: Request, error: Exception) -> Response:
    """Answer an error of ours, raised in a thread that vLLM's code uses, with its status."""
    assert isinstance(error, MmRouterError), "registered for errors of ours"
    return await vllm_error_handler(request, as_vllm_error(error))


async def _blame_the_request(request: Request, error: Exception) -> Response:
    """Answer 400 for a value that vLLM's own code did not expect while it read the request.

    Some validators look into values before their types are checked, and take empty lists for full
    ones; vLLM itself answers 500.
    """
    if isinstance(error, RecursionError):
        # Only JSON in a string can be so deep: no such body is parsed.
        message = "a value of the request, such as the arguments of a tool call, is nested too deep"
        return error_answer(message, HTTPStatus.BAD_REQUEST, kind="BadRequestError")
    frames = traceback.extract_tb(error.__traceback__)
    # Skip Pydantic's frames: a model raises for an attribute that it lacks.
    places = [
        f"{frame.filename}:{frame.name}" for frame in frames if "/pydantic/" not in frame.filename
    ]
    if not _OF_THE_SERVER.search(places[-1]) or not any(map(_READS_REQUESTS.search, places)):
        raise error
    message = f"a field of the request has a value that can't be: {error}"
    return error_answer(message, HTTPStatus.BAD_REQUEST)


def _keep_alive_s() -> int:
    if envs.is_set("VLLM_HTTP_TIMEOUT_KEEP_ALIVE"):
        return envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    return KEEP_ALIVE_S


EXPOSED: Final = ("Retry-After", "X-Request-Id")
"""Headers that pages may read beside the usual ones."""


class Cors(CORSMiddleware):
    """CORS headers (``--allowed-origins`` and the like) on every answer; answers preflights itself.

    vLLM's app would set them only on its own answers: a page would see "failed to fetch" where a
    429 tells when to retry.
    """

    def __init__(self, app: App, args: Namespace) -> None:
        super().__init__(
            app,
            allow_origins=args.allowed_origins,
            allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
            expose_headers=EXPOSED,
        )

    def of_refusal(self, origin: str | None) -> dict[str, str]:
        """Return the headers of an early rejection, whose ``origin`` may not be known yet."""
        if self.allow_all_origins and not self.allow_credentials:
            return self.simple_headers
        if origin is None or not self.is_allowed_origin(origin):
            return {}
        return self.simple_headers | {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}


def uvicorn_config(app: App, args: Namespace, settings: HttpSettings) -> uvicorn.Config:
    """Return the HTTP server's configuration. Raises ConfigurationError if TLS is unusable."""
    cors = Cors(app, args)
    limits = HeadLimits(args.h11_max_incomplete_event_size, args.h11_max_header_count)
    config = uvicorn.Config(
        cors,
        http=connections(settings, limits, cors.of_refusal),  # type: ignore[arg-type]
        ws="none",  # no route speaks it, and it would evade all limits
        # A pipelined request starts in the task of the one before it, whose key and salt it must
        # not have.
        reset_contextvars=True,
        host=args.host,
        port=args.port,
        uds=args.uds,
        lifespan="off",  # the readiness gate enters vLLM's own
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        timeout_keep_alive=_keep_alive_s(),
    )
    log_config = get_uvicorn_log_config(args)
    if log_config is not None:
        config.log_config = log_config
        config.configure_logging()
    adopt_servers_lines(args)
    try:
        config.load()
    except OSError as error:  # TLS errors too
        raise ConfigurationError(f"TLS can't be had by the --ssl-… flags: {error}") from error
    return config

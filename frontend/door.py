"""What a request passes before vLLM's app, in order: layers of ASGI, the outermost first.

The order stands here alone. Each layer is tested by itself, where it is.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from common.observability.tracing import enabled
from common.request_plane.fleet_sockets import leaves_host
from frontend.args import FrontendArgs
from frontend.asgi import App
from frontend.fetch import MediaAllowances
from frontend.gate import BodyGate
from frontend.http import (
    AdminGuard,
    Admission,
    EarlyStreamErrors,
    ErrorShapes,
    MergedMetrics,
    RequestIds,
    RetryAfter,
    Traced,
)
from frontend.processes import Siblings

logger = logging.getLogger(__name__)

Layer: TypeAlias = Callable[[App], App]


def guarded(app: App, args: FrontendArgs) -> App:
    """Put before an app what stands at the door from the first moment, with or without a model."""
    serve, access = args.serve, args.access
    open_to_all = access.users is None and serve.uds is None
    if open_to_all and leaves_host(f"tcp://{serve.host}:{serve.port}"):
        logger.warning("anybody who reaches %s may use this API: set --api-key-file", serve.host)
    root_path = serve.root_path or ""
    return _behind(
        [
            # A name first: log lines and answers of all that follows have it, refusals too.
            partial(RequestIds, answered=serve.enable_request_id_headers),
            # Whoever refuses below, Anthropic's clients can read it.
            partial(ErrorShapes, root_path=root_path),
            # Strangers go before anything that they say is read.
            partial(
                AdminGuard,
                api_keys=access.users,
                admin_keys=access.admins,
                root_path=root_path,
                unix_socket=serve.uds is not None,
                isolate=args.isolate_api_keys,
            ),
            # Outside of all that is full or not ready as yet.
            RetryAfter,
        ],
        app,
    )


def judged(app: App, args: FrontendArgs, siblings: Siblings | None) -> App:
    """Put before the app of a model, or of several, what judges requests and makes room for them.

    Args:
        siblings: the other processes of this frontend, if there are any.
    """
    root_path = args.serve.root_path or ""
    layers: list[Layer] = [
        # Reads the body, and gives the request a place: a span shows how long that took.
        partial(
            Admission, settings=args.http, several_keys=args.access.several, root_path=root_path
        ),
        # Needs the whole body. What it refuses cost the reading of its bytes and nothing more.
        partial(
            BodyGate,
            max_choices=args.http.max_choices,
            runs_tools=bool(args.serve.tool_server),
            root_path=root_path,
        ),
        # What the request's media may take, before vLLM's app begins to fetch them.
        partial(MediaAllowances, policy=args.media),
        # Closest to the app: it holds the first bytes of a stream back.
        EarlyStreamErrors,
    ]
    if enabled():
        layers.insert(0, Traced)
    if siblings is not None:
        # Answers what scrapers ask, and they need no place and make no span.
        layers.insert(0, partial(MergedMetrics, siblings=siblings, root_path=root_path))
    return _behind(layers, app)


def _behind(layers: Sequence[Layer], app: App) -> App:
    for layer in reversed(layers):
        app = layer(app)
    return app

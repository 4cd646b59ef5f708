"""The steps that a request passes before an app gets it. Their order is defined here alone."""

import logging
from functools import partial

from common.request_plane.fleet_sockets import leaves_host
from frontend.args import FrontendArgs
from frontend.asgi import Door, Step, unanswered
from frontend.fetch import allow_media
from frontend.gate import BodyGate
from frontend.http import (
    AdminGuard,
    Admission,
    History,
    MergedMetrics,
    ReadinessGate,
    hold_stream_heads,
    name_request,
    say_when_to_retry,
    send_deferred_parts,
    shape_errors,
    trace,
)
from frontend.processes import Siblings

logger = logging.getLogger(__name__)


def make_door(
    args: FrontendArgs,
    gate: ReadinessGate,
    siblings: Siblings | None = None,
    history: History | None = None,
) -> Door:
    serve, guard = args.serve, _guard(args)
    steps: list[Step] = [
        # First an id: log lines and answers of all later steps carry it, rejections too.
        partial(name_request, answered=serve.enable_request_id_headers),
        # Count answers as clients get them, from any later step.
        *([] if history is None else [history.watch]),
        # Rejections by any later step take Anthropic's shape on its paths.
        shape_errors,
        # Authenticate before reading any body.
        guard,
        # Before the steps that answer 429 or 503.
        say_when_to_retry,
        # Read no body and take no slot while no app can answer.
        gate,
        # Scrapes take no slot and create no span.
        MergedMetrics(siblings),
        # The span includes the time to receive the body and the wait for a slot.
        trace,
        # Read the body and take a slot.
        Admission(args.http, several_keys=args.access.several),
        # Needs the whole body; a rejection has cost no more than reading it.
        BodyGate(args.http.max_choices, runs_tools=bool(serve.tool_server)),
        # Budget the request's media before vLLM's app fetches them.
        partial(allow_media, policy=args.media),
        # Build large parts of an answer while it is sent.
        send_deferred_parts,
        # Closest to the app: holds back the first bytes of a stream.
        hold_stream_heads,
    ]
    return Door(unanswered, steps, sockets=[guard, gate], root_path=serve.root_path or "")


def _guard(args: FrontendArgs) -> AdminGuard:
    serve, access, is_local = args.serve, args.access, args.serve.uds is not None
    if access.users is None and not is_local and leaves_host(f"tcp://{serve.host}:{serve.port}"):
        logger.warning("the API on %s is open to everyone: set --api-key-file", serve.host)
    return AdminGuard(
        access.users, access.admins, unix_socket=is_local, isolate=args.isolate_api_keys
    )

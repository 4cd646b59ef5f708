"""What a request passes before an app gets it: steps, in order. The order stands here alone."""

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
        # A name first: log lines and answers of all that follows have it, refusals too.
        partial(name_request, answered=serve.enable_request_id_headers),
        # Answers as clients get them are counted, whoever gives them.
        *([] if history is None else [history.watch]),
        # Whoever refuses below, Anthropic's clients can read it.
        shape_errors,
        # Strangers go before anything that they say is read.
        guard,
        # Before all that is full or not ready as yet.
        say_when_to_retry,
        # Nothing is read, and no place is taken, for what can't be answered.
        gate,
        # Answers what scrapers ask, and they need no place and make no span.
        *([] if siblings is None else [MergedMetrics(siblings)]),
        # The span shows how long the body took, and the wait for a place.
        trace,
        # Reads the body, and gives the request a place.
        Admission(args.http, several_keys=args.access.several),
        # Needs the whole body. What it refuses cost the reading of its bytes and nothing more.
        BodyGate(args.http.max_choices, runs_tools=bool(serve.tool_server)),
        # What the request's media may take, before vLLM's app begins to fetch them.
        partial(allow_media, policy=args.media),
        # Large parts of an answer are made while it is sent.
        send_deferred_parts,
        # Closest to the app: it holds the first bytes of a stream back.
        hold_stream_heads,
    ]
    return Door(unanswered, steps, sockets=[guard, gate], root_path=serve.root_path or "")


def _guard(args: FrontendArgs) -> AdminGuard:
    serve, access, is_local = args.serve, args.access, args.serve.uds is not None
    if access.users is None and not is_local and leaves_host(f"tcp://{serve.host}:{serve.port}"):
        logger.warning("anybody who reaches %s may use this API: set --api-key-file", serve.host)
    return AdminGuard(
        access.users, access.admins, unix_socket=is_local, isolate=args.isolate_api_keys
    )

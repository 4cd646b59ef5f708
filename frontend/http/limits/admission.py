"""What this frontend works on at once; what there is no room for is refused.

Every request but a GET and its like takes a place, once its body has arrived: a client that
sends half of one holds memory of the bodies' own budget, for as long as the body's deadline.
GETs, such as ``/health`` and ``/v1/models``, are answered from memory and take none. Nor do admins'
requests: what an operator does about too much to do must not wait for it.
"""

import time

from common.errors import BodyError, OverloadedError
from common.observability.telemetry import INFLIGHT_REQUESTS, REQUESTS
from frontend.asgi import (
    App,
    Receive,
    Scope,
    Send,
    error_answer,
    has_body,
    once_more,
    overload_answer,
    route_path,
)
from frontend.http.access.admin import is_for_admins
from frontend.http.limits.bodies import Body, BodyReader
from frontend.http.limits.call_places import CallPlaces
from frontend.http.limits.tenant_quota import TenantQuota
from frontend.http.settings import HttpSettings
from frontend.request_context import current_context, note_arrival

_FREE = ("GET", "HEAD", "OPTIONS")


class Admission:
    """ASGI middleware that reads bodies, and answers 408, 413, 415 or 429 instead of passing on."""

    def __init__(
        self, app: App, settings: HttpSettings, *, several_keys: bool = False, root_path: str = ""
    ) -> None:
        """
        Args:
            several_keys: there is more than one API key, so none may take everything.
            root_path: prefix under which a proxy serves the app.
        """
        self._app = app
        self._root_path = root_path
        places, memory = settings.max_inflight, settings.body_memory_bytes
        share = settings.key_share if several_keys else 1.0
        self._places = TenantQuota("requests in flight", places, max(1, int(places * share)))
        self._calls = CallPlaces(places, max(1, int(places * share)))
        self._bodies = BodyReader(
            settings,
            # A key's share has room for one body of any allowed size.
            TenantQuota(
                "bytes of bodies", memory, max(settings.max_body_bytes, int(memory * share))
            ),
        )
        INFLIGHT_REQUESTS.set_function(lambda: self._places.taken)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or (scope["method"] in _FREE and not has_body(scope)):
            await self._app(scope, receive, send)
            return
        free = scope["method"] in _FREE or is_for_admins(route_path(scope, self._root_path))
        places = None if free else self._places
        tenant = current_context.get().tenant
        with Body(self._bodies, tenant) as body:
            try:
                if has_body(scope):
                    self._bodies.check(scope)
                    if places is not None:
                        places.check(tenant)  # or the body would be read in vain
                    content = await body.read(receive)
                    if content is None:
                        return
                    message = {"type": "http.request", "body": content, "more_body": False}
                    receive = once_more(message, receive)
                    del message
                    del content
                if places is not None:
                    places.take(tenant)
            except (BodyError, OverloadedError) as error:
                REQUESTS.labels(type(error).__name__).inc()
                await _answer(error)(scope, receive, send)
                return
            note_arrival(time.perf_counter())
            try:
                with self._calls.of_request(tenant):
                    await self._app(scope, receive, send)
            finally:
                if places is not None:
                    places.give_back(tenant)


def _answer(error: BodyError | OverloadedError) -> App:
    answer = error_answer(str(error), error.status)
    if isinstance(error, OverloadedError):
        answer = overload_answer(error)
    answer.headers["connection"] = "close"  # the rest of the body isn't read
    return answer

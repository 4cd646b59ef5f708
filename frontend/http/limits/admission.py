"""What this frontend works on at once; what there is no room for is refused.

Every request but a GET and its like takes a place, once its body has arrived: a client that
sends half of one holds memory of the bodies' own budget, for as long as the body's deadline.
GETs, such as ``/health`` and ``/v1/models``, are answered from memory and take none. Nor do admins'
requests: what an operator does about too much to do must not wait for it.
"""

import time

from common.errors import BodyError, OverloadedError
from common.observability.telemetry import INFLIGHT_REQUESTS, REQUESTS
from frontend.asgi import App, Arrival, error_answer, overload_answer, unanswered
from frontend.http.access.admin import is_for_admins
from frontend.http.limits.bodies import Body, BodyReader
from frontend.http.limits.call_places import CallPlaces
from frontend.http.limits.tenant_quota import TenantQuota
from frontend.http.settings import HttpSettings


class Admission:
    """Reads bodies, and gives requests their places."""

    def __init__(self, settings: HttpSettings, *, several_keys: bool = False) -> None:
        """
        Args:
            several_keys: there is more than one API key, so none may take everything.
        """
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

    async def __call__(self, arrival: Arrival) -> App | None:
        """Return a 408, 413, 415 or 429 for what there is no room for."""
        if not arrival.asks_for_work and not arrival.has_body:
            return None
        context, held = arrival.context, arrival.held
        tenant = context.tenant
        takes_place = arrival.asks_for_work and not is_for_admins(arrival.path)
        body = held.enter_context(Body(self._bodies, tenant))
        try:
            if arrival.has_body:
                self._bodies.check(arrival.headers)
                if takes_place:
                    self._places.check(tenant)  # or the body would be read in vain
                arrival.body = await body.read(arrival.receive)
                if arrival.body is None:
                    return unanswered
            if takes_place:
                self._places.take(tenant)
                held.callback(self._places.give_back, tenant)
        except (BodyError, OverloadedError) as error:
            REQUESTS.labels(type(error).__name__).inc()
            return _answer(error)
        context.arrived = time.perf_counter()
        held.enter_context(self._calls.of_request(context))
        return None


def _answer(error: BodyError | OverloadedError) -> App:
    answer = error_answer(str(error), error.status)
    if isinstance(error, OverloadedError):
        answer = overload_answer(error)
    answer.headers["connection"] = "close"  # the rest of the body isn't read
    return answer

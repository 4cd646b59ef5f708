"""Concurrency limit on requests and memory budget of their bodies; 429 for the excess.

A request takes a slot once its body has arrived. Until then it holds only memory of the bodies'
budget, for no longer than the body's deadline. GETs take no slot, since they are answered from
memory. Nor do admins' requests, which must pass under overload.
"""

import asyncio
import io
import time
from typing import Self

from starlette.datastructures import Headers

from common.errors import (
    BodyEncodedError,
    BodyError,
    BodyTooLargeError,
    BodyTooSlowError,
    OverloadedError,
)
from common.observability.telemetry import INFLIGHT_REQUESTS, REQUEST_BODY_BYTES, REQUESTS
from frontend.asgi import App, Arrival, Receive, error_answer, overload_answer, unanswered
from frontend.http.access.admin import is_for_admins
from frontend.http.limits.tenant_limits import TenantQuota
from frontend.http.settings import HttpSettings
from frontend.request_context import Tenant


class BodyReader:
    """Limits and budget of all bodies."""

    def __init__(self, settings: HttpSettings, budget: TenantQuota) -> None:
        """Count the bytes of bodies in the budget, from the first one until they are released."""
        self.largest = settings.max_body_bytes
        self.timeout_s = settings.body_timeout_s
        self.budget = budget
        REQUEST_BODY_BYTES.set_function(lambda: budget.taken)

    def check(self, headers: Headers) -> None:
        """Raise BodyTooLargeError or BodyEncodedError if the head alone rules the body out."""
        if int(headers.get("content-length", "0")) > self.largest:
            raise self.too_large()
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() not in ("", "identity"):
            raise BodyEncodedError("send the body as it is: no Content-Encoding is unpacked here")

    def too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body is larger than the {self.largest / 2**20:g} MiB of --max-body-mb"
        )


class Body:
    """The body of one request. Closing it returns its memory to the budget."""

    def __init__(self, reader: BodyReader, tenant: Tenant) -> None:
        self._reader = reader
        self._tenant = tenant
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.budget.give_back(self._tenant, self._size)

    async def read(self, receive: Receive) -> bytes | None:
        """Return the body; None if the client left before its end.

        Raises:
            BodyTooLargeError, BodyTooSlowError: it exceeds a limit.
            OverloadedError: there is no memory for it.
        """
        # Copy bytes as they come, into the buffer that becomes the result: joining 50 MB at the
        # end stopped the event loop for 300 ms.
        buffer = io.BytesIO()
        try:
            async with asyncio.timeout(self._reader.timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    self._add(buffer, message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError as error:
            raise BodyTooSlowError(
                f"the body did not arrive within {self._reader.timeout_s:g} s"
            ) from error
        return buffer.getvalue()

    def _add(self, buffer: io.BytesIO, piece: bytes) -> None:
        if self._size + len(piece) > self._reader.largest:
            raise self._reader.too_large()
        self._reader.budget.take(self._tenant, len(piece))
        self._size += len(piece)
        buffer.write(piece)


class Admission:
    """Read bodies, and give requests their slots."""

    def __init__(self, settings: HttpSettings, *, several_keys: bool = False) -> None:
        """Let no key take everything if there are ``several_keys``."""
        places, memory = settings.max_inflight, settings.body_memory_bytes
        share = settings.key_share if several_keys else 1.0
        self._places = TenantQuota("requests in flight", places, max(1, int(places * share)))
        self._bodies = BodyReader(
            settings,
            # A key's share has room for one body of any allowed size.
            TenantQuota(
                "bytes of bodies", memory, max(settings.max_body_bytes, int(memory * share))
            ),
        )
        INFLIGHT_REQUESTS.set_function(lambda: self._places.taken)

    async def __call__(self, arrival: Arrival) -> App | None:
        """Return a 408, 413, 415 or 429 for a rejected request."""
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
        return None


def _answer(error: BodyError | OverloadedError) -> App:
    answer = error_answer(str(error), error.status)
    if isinstance(error, OverloadedError):
        answer = overload_answer(error)
    answer.headers["connection"] = "close"  # the rest of the body isn't read
    return answer

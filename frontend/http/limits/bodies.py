"""Reads the body of a request as a whole, within a size, a time and a budget of memory."""

import asyncio
import io
from typing import Self

from starlette.datastructures import Headers

from common.errors import BodyEncodedError, BodyTooLargeError, BodyTooSlowError
from common.observability.telemetry import REQUEST_BODY_BYTES
from frontend.asgi import Receive
from frontend.http.limits.tenant_quota import TenantQuota
from frontend.http.settings import HttpSettings
from frontend.request_context import Tenant


class BodyReader:
    """What the bodies of all requests have in common."""

    def __init__(self, settings: HttpSettings, budget: TenantQuota) -> None:
        """
        Args:
            budget: bytes of all bodies, from their first byte until they are let go.
        """
        self.largest = settings.max_body_bytes
        self.timeout_s = settings.body_timeout_s
        self.budget = budget
        REQUEST_BODY_BYTES.set_function(lambda: budget.taken)

    def check(self, headers: Headers) -> None:
        """Refuse by its head what need not be read.

        Raises:
            BodyTooLargeError: it says that it is too large.
            BodyEncodedError: it is compressed.
        """
        if int(headers.get("content-length", "0")) > self.largest:
            raise self.too_large()
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() not in ("", "identity"):
            raise BodyEncodedError("send the body as it is: no Content-Encoding is unpacked here")

    def too_large(self) -> BodyTooLargeError:
        """The error of a body that is too large."""
        return BodyTooLargeError(
            f"the body is larger than the {self.largest / 2**20:g} MiB of --max-body-mb"
        )


class Body:
    """The body of one request. Closing it gives its memory back to the budget."""

    def __init__(self, reader: BodyReader, tenant: Tenant) -> None:
        self._reader = reader
        self._tenant = tenant
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.budget.give_back(self._tenant, self._size)

    async def read(self, receive: Receive) -> bytes | None:
        """All of it, or None if the client left before its end.

        Raises:
            BodyTooLargeError: it is larger than allowed.
            BodyTooSlowError: it did not arrive in time.
            OverloadedError: there is no memory for it.
        """
        # Bytes are copied here as they come, and its buffer becomes the result: joining 50 MB at
        # the end stopped the event loop for 300 ms.
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

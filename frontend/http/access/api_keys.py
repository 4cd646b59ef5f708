"""Who may use the HTTP API: vLLM's API keys, in front of every route but a few.

vLLM's own check is not used: it guards ``/v1`` and its like only, others of its routes generate too
(``/invocations``), and it knows the keys of the start only.
"""

import hashlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from common.errors import ConfigurationError
from frontend.asgi import App, Arrival, Receive, Scope, Send
from frontend.http.operator.status_page import PAGE
from frontend.request_context import EVERYBODY, Tenant

logger = logging.getLogger(__name__)

OPEN: Final = PAGE | {
    "/health",
    "/ping",
    "/ready",
    "/readyz",
    "/livez",
    "/metrics",
    "/version",
}
"""Paths for probes, scrapers and the status page, which say nothing of any request."""


def read_keys(path: Path, what: str = "API") -> list[str]:
    """The keys in a file: one a line, empty lines and those after ``#`` left out.

    Args:
        what: kind of the keys, for messages.

    Raises:
        ConfigurationError: it can't be read or holds none, which would let everybody in.
    """
    try:
        lines = path.read_text().splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the {what} keys in {path} can't be read: {error}") from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ConfigurationError(f"{path} holds no {what} key")
    # The group may read, as with the fleet key: that is how Kubernetes mounts secrets.
    if mode & 0o037:
        logger.warning("the %s keys in %s are open to other users: chmod 600 %s", what, path, path)
    return keys


class Keys:
    """Some keys, by their digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """Let these keys count, and no others."""
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, key: str) -> bool:
        return _digest(key) in self._digests

    def shown_by(self, headers: Headers) -> Tenant | None:
        """Return the one that a request shows, by its digest; None if it shows none of these.

        Anthropic's header, ``x-api-key``, counts where there is no ``Authorization``.
        """
        kind, _, key = headers.get("authorization", "").partition(" ")
        if "authorization" not in headers:
            kind, key = "bearer", headers.get("x-api-key", "")
        digest = _digest(key)
        # All are compared, so that the time says nothing.
        matches = [secrets.compare_digest(digest, each) for each in self._digests]
        return Tenant(digest.hex()) if kind.lower() == "bearer" and any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class ApiKeyGuard:
    """Lets in what carries one of the keys, or goes to an open path, and notes whose it is."""

    def __init__(self, keys: Keys, *, isolate: bool = False) -> None:
        """
        Args:
            isolate: whether no two keys share anything that is kept.
        """
        self._isolate = isolate
        self._keys = keys

    async def __call__(self, arrival: Arrival) -> App | None:
        """Return a 401 for others."""
        tenant = self._tenant(arrival)
        if tenant is not None:
            arrival.context.tenant, arrival.context.isolated = tenant, self._isolate
            return None
        if arrival.scope["type"] == "websocket":
            return _close_socket
        refusal = JSONResponse({"error": "Unauthorized"}, 401)
        if arrival.has_body:
            refusal.headers["connection"] = "close"  # it isn't read
        return refusal

    def _tenant(self, arrival: Arrival) -> Tenant | None:
        """Whose request it is, None if it is nobody's."""
        tenant = self._keys.shown_by(arrival.headers)
        if tenant is not None:
            return tenant
        if arrival.has_body:
            return None  # strangers have nothing to say
        # A browser asks what it may send before it sends a key.
        is_open = arrival.path.rstrip("/") in OPEN or arrival.scope.get("method") == "OPTIONS"
        return EVERYBODY if is_open else None


async def _close_socket(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.close", "code": 1008})

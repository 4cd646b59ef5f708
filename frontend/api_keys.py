"""Who may use the HTTP API: vLLM's API keys, in front of every route but a few.

vLLM's own check, which stays in force, guards ``/v1`` and its like only; others of its
routes generate too (``/invocations``), and ours tell what users asked for.
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
from frontend.asgi import App, Receive, Scope, Send

logger = logging.getLogger(__name__)

OPEN: Final = frozenset({"/health", "/ping", "/ready", "/readyz", "/livez", "/metrics", "/version"})
"""Paths for probes and scrapers, which say nothing of any request."""


def read_keys(path: Path) -> list[str]:
    """The keys in a file: one a line, empty lines and those after ``#`` left out.

    Raises:
        ConfigurationError: it can't be read or holds none, which would let everybody in.
    """
    try:
        lines = path.read_text().splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the API keys in {path} can't be read: {error}") from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ConfigurationError(f"{path} holds no API key")
    if mode & 0o077:
        logger.warning("the API keys in %s are open to other users: chmod 600 %s", path, path)
    return keys


class ApiKeyGuard:
    """Passes on what carries one of the keys, or goes to an open path."""

    def __init__(self, app: App, keys: Sequence[str], root_path: str = "") -> None:
        """
        Args:
            keys: at least one.
            root_path: prefix under which a proxy serves the app.
        """
        self._app = app
        self._root_path = root_path
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or answer 401."""
        if scope["type"] not in ("http", "websocket") or self._allows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = JSONResponse({"error": "Unauthorized"}, 401)
            await refusal(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(self._root_path).rstrip("/")
        # A browser asks what it may send before it sends a key.
        if path in OPEN or scope.get("method") == "OPTIONS":
            return True
        kind, _, key = Headers(scope=scope).get("Authorization", "").partition(" ")
        digest = hashlib.sha256(key.encode()).digest()
        # All are compared, so that the time says nothing.
        matches = [secrets.compare_digest(digest, each) for each in self._digests]
        return kind.lower() == "bearer" and any(matches)

"""API keys on all routes but a few: vLLM's keys of flags, and keys in files, which may change.

vLLM's own check is not used: it guards ``/v1`` and its like only, although other routes generate
too (``/invocations``), and it knows only the keys of the start.
"""

import asyncio
import hashlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from common.cli.process_settings import KeySettings, read_keys
from common.errors import ConfigurationError
from frontend.asgi import App, Arrival, Receive, Scope, Send
from frontend.http.operator.app import PAGE
from frontend.request_context import EVERYBODY, Tenant

logger = logging.getLogger(__name__)

OPEN: Final = PAGE | {"/health", "/livez", "/metrics", "/ping", "/version"}
"""Paths of probes, scrapers and the status page, which reveal nothing about any request."""

POLL_INTERVAL_S: Final = 5.0
"""Poll interval of the files, in seconds."""


def _read(path: Path, what: str) -> list[str]:
    """Read keys; warn if other users can. The group may: Kubernetes mounts secrets like that."""
    keys, mode = read_keys(path, what)
    if mode & 0o037:
        logger.warning("the %s keys in %s are open to other users: chmod 600 %s", what, path, path)
    return keys


class Keys:
    """Keys, by their digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, key: str) -> bool:
        return _digest(key) in self._digests

    def shown_by(self, headers: Headers) -> Tenant | None:
        """Return the tenant of a request's key. ``x-api-key`` counts without ``Authorization``."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        if "authorization" not in headers:
            kind, key = "bearer", headers.get("x-api-key", "")
        digest = _digest(key)
        # Compare all keys, so that the time reveals nothing.
        matches = [secrets.compare_digest(digest, each) for each in self._digests]
        return Tenant(digest.hex()) if kind.lower() == "bearer" and any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class ApiKeyGuard:
    """Admit requests with a key or to an open path; note the tenant, and whether to isolate it."""

    def __init__(self, keys: Keys, *, isolate: bool = False) -> None:
        self._isolate = isolate
        self._keys = keys

    async def __call__(self, arrival: Arrival) -> App | None:
        """Return a 401 for a rejected request."""
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
        """Return the tenant of a request; None to reject it."""
        tenant = self._keys.shown_by(arrival.headers)
        if tenant is not None:
            return tenant
        if arrival.has_body:
            return None  # without a key no body is read
        # A browser's preflight carries no key.
        is_open = arrival.path.rstrip("/") in OPEN or arrival.scope.get("method") == "OPTIONS"
        return EVERYBODY if is_open else None


async def _close_socket(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.close", "code": 1008})


class FollowedFiles(ABC):
    """Watch files. A replaced symbolic link is a change, as Kubernetes makes them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._seen = self._state()

    @abstractmethod
    async def changed(self) -> None:
        """Load the files, or log why they are unusable."""

    async def follow(self) -> None:
        """Poll the files, if there are any."""
        while self._paths:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Load the files if one has changed since the last look."""
        state = await asyncio.to_thread(self._state)
        if state != self._seen:
            self._seen = state
            await self.changed()

    def _state(self) -> list[tuple[int, int, int] | None]:
        state: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                found = path.stat()
            except OSError:
                state.append(None)  # it is being replaced
            else:
                state.append((found.st_ino, found.st_mtime_ns, found.st_size))
        return state


class AccessKeys(FollowedFiles):
    """Keys in force. Without ``users`` everyone is admitted, without ``admins`` local clients."""

    def __init__(self, given: Sequence[str], settings: KeySettings) -> None:
        """Raise ConfigurationError for an unusable file, or a key that is of both kinds."""
        self._given = given
        self._settings = settings
        files = (settings.api_key_file, settings.admin_key_file)
        # Before the files are read, or a change in between would go unseen.
        super().__init__(file for file in files if file is not None)
        users, admins = self._read()
        self.users = Keys(users) if users else None
        self.admins = Keys(admins) if admins else None

    @property
    def several(self) -> bool:
        """Whether there is more than one API key."""
        return self.users is not None and len(self.users) > 1

    async def changed(self) -> None:
        """Load the keys; unusable files change nothing. Admitted requests go on."""
        try:
            users, admins = await asyncio.to_thread(self._read)
        except ConfigurationError as error:
            logger.warning("the key files have changed, but the keys stay as they are: %s", error)
            return
        for keys, now in ((self.users, users), (self.admins, admins)):
            if keys is not None:
                keys.replace(now)
        logger.info(
            "the key files have changed: %d API keys and %d admin keys are in force",
            len(users),
            len(admins),
        )

    def _read(self) -> tuple[list[str], list[str]]:
        settings = self._settings
        users = [*self._given]
        if settings.api_key_file is not None:
            users += _read(settings.api_key_file, "API")
        admins: list[str] = []
        if (file := settings.admin_key_file) is not None:
            admins = _read(file, "admin")
        if not set(admins).isdisjoint(users):
            raise ConfigurationError(f"an admin key in {file} is an API key as well")
        return list(dict.fromkeys(users)), admins

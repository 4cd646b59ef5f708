"""API keys in front of every route but a few: vLLM's of flags, and those in files, which change.

vLLM's own check is not used: it guards ``/v1`` and its like only, others of its routes generate too
(``/invocations``), and it knows the keys of the start only.
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

from common.errors import ConfigurationError
from frontend.asgi import App, Arrival, Receive, Scope, Send
from frontend.http.operator.app import PAGE
from frontend.http.settings import KeySettings
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

LOOK_S: Final = 5.0
"""How often they are looked at."""


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
    """Let in what carries one of the keys, or goes to an open path, and note whose it is; if
    ``isolate``, no two keys share anything that is kept.
    """

    def __init__(self, keys: Keys, *, isolate: bool = False) -> None:
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


class FollowedFiles(ABC):
    """Some files. A link that leads to another file is a change, as Kubernetes makes them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._seen = self._state()

    @abstractmethod
    async def changed(self) -> None:
        """Take what is in the files now, or log why it can't be taken."""

    async def follow(self) -> None:
        """Look again and again, if there are any."""
        while self._paths:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take what is in the files, if one is another than at the last look."""
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
    """All keys that are in force.

    Attributes:
        users: None to let everybody in.
        admins: open what only admins may see; None if they come from this host.
    """

    def __init__(self, given: Sequence[str], settings: KeySettings) -> None:
        """
        Args:
            given: to users, by flags or the environment.

        Raises:
            ConfigurationError: a file can't be read or holds no key, or a key is of both kinds.
        """
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
        """Whether there is more than one user."""
        return self.users is not None and len(self.users) > 1

    async def changed(self) -> None:
        """Take the keys that are in the files.

        Requests that were let in go on. Files that can't be used leave the keys as they are.
        """
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
            users += read_keys(settings.api_key_file)
        file = settings.admin_key_file
        admins = [] if file is None else read_keys(file, "admin")
        if not set(admins).isdisjoint(users):
            raise ConfigurationError(f"an admin key in {file} is an API key as well")
        return list(dict.fromkeys(users)), admins

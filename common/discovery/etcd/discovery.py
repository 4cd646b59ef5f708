"""Cards as etcd keys: workers put them under a lease, frontends poll all below a prefix."""

import asyncio
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import ClassVar, Final
from urllib.parse import SplitResult, unquote

from common.aio.supervised import is_cancelled
from common.discovery.base import RENEW_S, Discovery, RenewedPublisher, options_of
from common.discovery.etcd.client import (
    EtcdAccess,
    EtcdClient,
    EtcdRefusedError,
    EtcdTooLargeError,
)
from common.discovery.sealed_cards import seal
from common.discovery.watcher import Entry, Odd, Place, PollingWatcher
from common.errors import ConfigurationError, DiscoveryError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import CARD_LIMITS, WorkerCard

logger = logging.getLogger(__name__)

_WORKER_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_INCARNATION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def key_of(prefix: str, worker_id: WorkerId, incarnation: Incarnation) -> bytes:
    """Return the key of a card. Raises DiscoveryError: the worker's id can't be part of one."""
    if not _WORKER_ID.fullmatch(worker_id) or not _INCARNATION.fullmatch(incarnation):
        raise DiscoveryError(
            f"worker id {worker_id!r} can't be part of a key: use letters, digits, '.', '_', '-'"
        )
    return f"{prefix}/{worker_id}/{incarnation}".encode()


def named_by(prefix: str, key: bytes) -> tuple[WorkerId, Incarnation] | None:
    """Return the worker and incarnation in a key; None if it is not named like a card."""
    rest = key.removeprefix(f"{prefix}/".encode())
    worker_id, _, incarnation = rest.decode(errors="replace").partition("/")
    if not _WORKER_ID.fullmatch(worker_id) or not _INCARNATION.fullmatch(incarnation):
        return None
    return WorkerId(worker_id), Incarnation(incarnation)


POLL_S: Final = 0.5

_ENOUGH: Final = CARD_LIMITS.most_bytes + 1

LEASE_S: Final = 10
"""After so long without a renewal etcd deletes a card. It may take longer, never less."""


class EtcdCardPublisher(RenewedPublisher):
    """Publishes one card as ``PREFIX/WORKER_ID/INCARNATION``."""

    place = "etcd"

    def __init__(
        self, client: EtcdClient, prefix: str, key: FleetKey | None, *, renew_s: float
    ) -> None:
        super().__init__(key, renew_s)
        self._client = client
        self._prefix = prefix
        self._name = b""
        self._content = b""
        self._lease = 0  # none
        self._put_at = 0  # revision of our last put; none
        self._one_at_a_time = asyncio.Lock()
        self._putting: asyncio.Task[None] | None = None

    async def check(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        name = key_of(self._prefix, worker_id, incarnation)
        try:
            await self._client.check_put(name)
        except DiscoveryError as error:
            raise DiscoveryError(f"card can't be put at {name.decode()}: {error}") from error

    async def publish(self, card: WorkerCard) -> None:
        name = key_of(self._prefix, card.worker_id, card.incarnation)
        async with self._one_at_a_time:
            if self.withdrawn:
                return
            self._name, self._content, self._put_at = name, seal(card, self.key), 0
            self._putting = asyncio.create_task(self._put(), name="put-card")
            try:
                await self._putting
            except DiscoveryError as error:
                raise DiscoveryError(f"card can't be put at {name.decode()}: {error}") from error
            except asyncio.CancelledError:
                if not self._has_left() or is_cancelled():
                    raise
            self.keep_renewed()

    async def withdraw(self) -> None:
        if self._putting is not None:
            self._putting.cancel()
        await super().withdraw()

    async def _remove(self) -> None:
        async with self._one_at_a_time:
            if self._lease:
                # A put that was cancelled midway finds no lease, so it does nothing.
                await self._client.revoke(self._lease)

    async def _close(self) -> None:
        await self._client.close()

    def _has_left(self) -> bool:
        """Read ``withdrawn`` again: an await may have changed it, unknown to mypy."""
        return self.withdrawn

    async def _put(self) -> None:
        """Put the card, with a new lease if there is none or it has expired."""
        for last in (False, True):
            if not self._lease:
                # Drawn before the request, so that it can be revoked in any case.
                self._lease = secrets.randbits(62) + 1
                await self._client.grant(self._lease, LEASE_S)
            try:
                self._put_at = await self._client.put(
                    self._name, self._content, self._lease, self._put_at
                )
            except EtcdRefusedError as error:
                if last or not error.not_found:
                    raise
                self._lease = 0
            else:
                return

    async def _renew(self) -> None:
        async with self._one_at_a_time:
            before = self._put_at
            if self._lease and not await self._client.keep_alive(self._lease):
                self._lease, self._put_at = 0, 0
            await self._put()
            lost = before != 0 and self._put_at != before
        if lost:
            DISCOVERY_ERRORS.labels("lost").inc()
            logger.warning(
                "card %s was lost or changed by another process; rewriting it", self._name.decode()
            )


class CardKeys(Place):
    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self.poll_s = POLL_S
        self._client = client
        self._prefix = prefix

    def __str__(self) -> str:
        return f"etcd {self._prefix}"

    async def pages(self) -> AsyncGenerator[Iterable[Entry], None]:
        async with aclosing(self._client.revisions(f"{self._prefix}/".encode())) as pages:
            async for page in pages:
                yield [
                    Entry(key.decode(errors="backslashreplace"), revision, self._named_by(key))
                    for key, revision in page
                ]

    async def read(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        by_key = {entry.name.encode(): entry for entry in entries}
        try:
            found = await self._client.read(list(by_key))
        except EtcdTooLargeError as error:
            if len(entries) == 1:
                return [entries[0]._replace(whose=Odd("size", str(error)))]
            half = len(entries) // 2
            return [*await self.read(entries[:half]), *await self.read(entries[half:])]
        return [
            # Keep just enough of an oversized value to detect its size.
            by_key[each.key]._replace(version=each.revision, content=each.value[:_ENOUGH])
            for each in found
            if each.key in by_key
        ]

    async def close(self) -> None:
        await self._client.close()

    def _named_by(self, key: bytes) -> tuple[WorkerId, Incarnation] | Odd:
        named = named_by(self._prefix, key)
        return named or Odd("name", f"it is not named {self._prefix}/WORKER_ID/INCARNATION")


_ENDPOINT: Final = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
LOOKUP_S: Final = 5.0  # how long a name server may take

_OPTIONS: Final = ("ca", "certificate", "key", "user", "password-file")


@dataclass(frozen=True)
class EtcdDiscovery(Discovery):
    form: ClassVar[str] = "etcd://host:2379,host:2379/prefix"

    access: EtcdAccess
    prefix: str

    @classmethod
    def from_url(cls, url: SplitResult) -> "EtcdDiscovery":
        if "@" in url.netloc:
            raise ConfigurationError(
                "a password has no place in a URL: write ?user=NAME&password-file=FILE"
            )
        endpoints = url.netloc.split(",")
        for endpoint in endpoints:
            port = endpoint.rpartition(":")[2] if _has_port(endpoint) else "2379"
            if not _ENDPOINT.fullmatch(endpoint) or not 0 < int(port) < 1 << 16:
                raise ConfigurationError(f"{endpoint!r} is no HOST:PORT")
        prefix = unquote(url.path, errors="strict").rstrip("/")
        if not prefix or url.fragment or not prefix.isprintable():
            raise ConfigurationError("it names no prefix, such as /mmrouter")
        return cls(_access(endpoints, options_of(url, _OPTIONS)), prefix)

    def __str__(self) -> str:
        return f"etcd://{','.join(self.access.endpoints)}{self.prefix}"

    def check_names(self) -> None:
        """Raise DiscoveryError if no member's host is known in :data:`LOOKUP_S`. Blocks."""
        hosts = {endpoint.rpartition(":")[0].strip("[]") for endpoint in self.access.endpoints}
        answers: SimpleQueue[str] = SimpleQueue()

        def look_up(host: str) -> None:
            try:
                socket.getaddrinfo(host, None)
            except (OSError, UnicodeError) as error:
                answers.put(f"{host}: {getattr(error, 'strerror', error)}")
            else:
                answers.put("")

        for host in hosts:
            threading.Thread(target=look_up, args=(host,), daemon=True).start()
        ends = time.monotonic() + LOOKUP_S
        faults: list[str] = []
        try:
            while len(faults) < len(hosts):
                fault = answers.get(timeout=max(0.0, ends - time.monotonic()))
                if not fault:
                    return
                faults.append(fault)
        except Empty:
            faults.append(f"no answer from the name server in {LOOKUP_S:g} s")
        raise DiscoveryError(
            f"no host of {self} is known: {'; '.join(faults)}; check --discovery and the name "
            "server"
        )

    def publisher(
        self, key: FleetKey | None = None, *, renew_s: float = RENEW_S
    ) -> EtcdCardPublisher:
        return EtcdCardPublisher(EtcdClient(self.access), self.prefix, key, renew_s=renew_s)

    def watcher(self, key: FleetKey | None = None) -> PollingWatcher:
        return PollingWatcher(CardKeys(EtcdClient(self.access), self.prefix), key)


def _access(endpoints: list[str], options: dict[str, str]) -> EtcdAccess:
    for one, needed in (
        ("certificate", "key"),
        ("key", "certificate"),
        ("certificate", "ca"),
        ("user", "password-file"),
        ("password-file", "user"),
    ):
        if one in options and needed not in options:
            raise ConfigurationError(f"its option {one!r} needs {needed!r} as well")
    files = {name: Path(value) for name, value in options.items() if name != "user"}
    return EtcdAccess(
        endpoints=tuple(each if _has_port(each) else f"{each}:2379" for each in endpoints),
        ca=files.get("ca"),
        certificate=files.get("certificate"),
        key=files.get("key"),
        user=options.get("user"),
        password_file=files.get("password-file"),
    )


def _has_port(endpoint: str) -> bool:
    return endpoint.rpartition(":")[2].isdigit() and not endpoint.endswith("]")

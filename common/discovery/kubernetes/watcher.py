"""A frontend's side: reads all Leases, and watches from that version on.

Whether a Lease lives is judged by when this frontend saw it renewed, and by a list that it asked
for itself: a watch that falls silent ends nobody, and no two clocks are ever compared.
"""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final

from common.discovery.base import StreamWatcher
from common.discovery.kubernetes.client import KubernetesRefusedError, LeaseClient, Seen
from common.discovery.kubernetes.leases import Lease
from common.discovery.sealed_cards import NO_ROOM, CardRoom, KnownCard
from common.errors import DiscoveryError
from common.fleet_key import FleetKey
from common.observability.telemetry import DISCOVERY_ERRORS

logger = logging.getLogger(__name__)

LEASE_S: Final = 10.0  # a card whose Lease was not renewed for this long is void

LISTS: Final = 2
"""How many lists in a row have to say so, with an equal part of that time between them."""

MAX_ODD: Final = 1000  # leases that are no cards and are remembered, each to be said once


@dataclass
class _Held:
    """What a watcher knows of one Lease.

    Attributes:
        known: the card on it.
        renewed: what stood there when it was read last.
        alive: whether it was seen to be renewed, or to appear. One that lay there at first sight
            may be of a worker that died long ago.
        since: when it was seen so, or found not renewed; monotonic seconds.
        missed: lists in a row that found it not renewed.
    """

    known: KnownCard
    renewed: str
    alive: bool
    since: float
    missed: int = 0


class KubernetesCardWatcher(StreamWatcher):
    """Watches the Leases that a selector finds."""

    def __init__(
        self,
        client: LeaseClient,
        key: FleetKey | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            clock: monotonic seconds.
        """
        super().__init__(key)
        self._client = client
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._room = CardRoom()
        self._odd: set[str] = set()
        self._look_at = 0.0
        self._to_list = False

    async def _close(self) -> None:
        await self._client.close()

    def note_problem(self, error: DiscoveryError) -> None:
        if not (isinstance(error, KubernetesRefusedError) and error.expired):  # a list heals that
            super().note_problem(error)

    async def _watched(self) -> AsyncGenerator[None, None]:
        for held in self._held.values():  # who could not renew has all the time again
            held.since, held.missed = self._clock(), 0
        while True:
            version = await self._list()
            self.problems.clear()
            yield
            while not self._is_to_list():
                silent = True
                async with contextlib.aclosing(self._client.watch(version)) as watched:
                    async for seen in watched:
                        silent = False
                        self.backoff.reset()
                        for each in seen:
                            version = each.version or version
                            self._note_seen(each)
                        yield
                        if self._is_to_list():
                            break
                if silent:
                    raise DiscoveryError("Kubernetes ends watches at once")

    async def _list(self) -> str:
        """Read all Leases, and judge whether they live."""
        version, there = "", set()
        first = not self.has_read
        async with contextlib.aclosing(self._client.read()) as pages:
            async for version, leases in pages:  # noqa: B007
                for lease in leases:
                    there.add(lease.name)
                    self._note(lease, at_first_sight=first)
        if first and not there:  # as it would be in a namespace that is not there
            await self._client.check_namespace()
        self.has_read, self._to_list = True, False
        for name in self._held.keys() - there:
            self._forget(name)
        self._odd &= there
        for held in self._held.values():
            if self._is_quiet(held):
                held.since, held.missed = self._clock(), held.missed + 1
                if held.missed >= LISTS:
                    held.alive = False
                    self.tell(held.known.end())
        return version

    def _is_quiet(self, held: _Held) -> bool:
        return held.known.told and self._clock() - held.since > LEASE_S / LISTS

    def _is_to_list(self) -> bool:
        """Whether some Lease was quiet for so long that a list has to say how it is."""
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + LEASE_S / LISTS / 10
            self._to_list = any(map(self._is_quiet, self._held.values()))
        return self._to_list

    def _note_seen(self, seen: Seen) -> None:
        if seen.lease is None:
            return
        if seen.deleted:
            self._forget(seen.lease.name)
            self._odd.discard(seen.lease.name)
        else:
            self._note(seen.lease)

    def _forget(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            self._room.give_back(name)
            self.tell(held.known.end())

    def _note(self, lease: Lease, *, at_first_sight: bool = False) -> None:
        whose = lease.whose()
        if whose is None:
            self._note_odd(lease.name, "name", "it is not named as that of a card")
            return
        content = lease.card
        held = self._held.get(lease.name)
        if not self._room.take(lease.name, len(content)):
            self._note_odd(lease.name, "size", NO_ROOM)
            return
        if held is None:
            held = _Held(KnownCard(*whose), lease.renewed, not at_first_sight, self._clock())
            self._held[lease.name] = held
            renewed = not at_first_sight
        else:
            renewed = held.renewed != lease.renewed
            held.renewed = lease.renewed
            held.alive = held.alive or renewed
        if not renewed and content == held.known.content:
            return
        usable, change = held.known.look(content, self.key, alive=held.alive)
        if renewed and usable:
            held.since, held.missed = self._clock(), 0
        self.tell(change)

    def _note_odd(self, name: str, reason: str, what: str) -> None:
        if name not in self._odd and len(self._odd) < MAX_ODD:
            self._odd.add(name)
            DISCOVERY_ERRORS.labels(reason).inc()
            logger.warning("Lease %s in %s is skipped: %s", name, self._client.namespace, what)

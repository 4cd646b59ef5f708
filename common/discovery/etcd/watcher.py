"""A frontend's side: reads all cards, and watches from that revision on."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from common.backoff import Backoff
from common.discovery.base import CardChange, CardWatcher
from common.discovery.etcd.client import EtcdClient, Stored
from common.discovery.etcd.keys import named_by
from common.discovery.known_card import KnownCard
from common.errors import DiscoveryError
from common.fleet_key import FleetKey
from common.observability.telemetry import DISCOVERY_ERRORS

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
"""Between tries while etcd can't be read."""


class EtcdCardWatcher(CardWatcher):
    """Watches the keys below a prefix."""

    def __init__(self, client: EtcdClient, prefix: str, key: FleetKey | None) -> None:
        self._client = client
        self._prefix = prefix
        self._key = key
        self._known: dict[bytes, KnownCard] = {}
        self._odd: set[bytes] = set()
        self._pending: deque[CardChange] = deque()
        self._has_read = False
        self._problems: set[str] = set()

    async def changes(self) -> AsyncIterator[CardChange]:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while True:
                try:
                    async with contextlib.aclosing(self._watched()) as looks:
                        async for _ in looks:
                            backoff.reset()
                            self._problems.clear()
                            while self._pending:
                                yield self._pending.popleft()
                except DiscoveryError as error:
                    if not self._has_read:
                        raise DiscoveryError(f"no cards can be read: {error}") from error
                    DISCOVERY_ERRORS.labels("listing").inc()
                    if str(error) not in self._problems:
                        self._problems.add(str(error))
                        logger.error("no cards can be read, the last ones stay: %s", error)
                await asyncio.sleep(backoff.next_s())
        finally:
            await self._client.close()

    async def _watched(self) -> AsyncGenerator[None, None]:
        """Note all changes, and stop after each look for them to be told."""
        prefix = f"{self._prefix}/".encode()
        revision, found = await self._client.read(prefix)
        self._has_read = True
        present = {each.key for each in found}
        self._odd &= present
        for name in self._known.keys() - present:
            self._note(Stored(name, None))
        for each in found:
            self._note(each)
        yield
        async with contextlib.aclosing(self._client.watch(prefix, revision + 1)) as watched:
            async for events in watched:
                for each in events:
                    self._note(each)
                yield

    def _note(self, stored: Stored) -> None:
        """Something was put, deleted or found."""
        named = named_by(self._prefix, stored.key)
        change: CardChange | None
        if stored.value is None:
            self._odd.discard(stored.key)
            known = self._known.pop(stored.key, None)
            change = None if known is None else known.end()
        elif named is None:
            if stored.key not in self._odd:
                self._odd.add(stored.key)
                DISCOVERY_ERRORS.labels("name").inc()
                logger.warning(
                    "key %r is skipped: it is not named %s/WORKER_ID/INCARNATION",
                    stored.key,
                    self._prefix,
                )
            return
        else:
            known = self._known.setdefault(stored.key, KnownCard(*named))
            _, change = known.look(stored.value, self._key)
        if change is not None:
            self._pending.append(change)

"""The Leases that a selector finds, as a place for cards."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from common.discovery.kubernetes.client import LeaseClient
from common.discovery.kubernetes.leases import LEASE_S, Lease
from common.discovery.watcher import Entry, Odd, Place

POLL_S: Final = 2.0  # a list is read by the API server, for each frontend


class CardLeases(Place):
    def __init__(self, client: LeaseClient) -> None:
        self.poll_s, self.lease_s = POLL_S, LEASE_S
        self._client = client
        self._seen_any = False

    def __str__(self) -> str:
        return f"namespace {self._client.namespace}"

    async def pages(self) -> AsyncGenerator[Sequence[Entry], None]:
        async with aclosing(self._client.read()) as pages:
            async for page in pages:
                self._seen_any = self._seen_any or bool(page)
                yield [_entry(lease) for lease in page]
        if not self._seen_any:  # as it would be in a namespace that is not there
            await self._client.check_namespace()
            self._seen_any = True

    async def close(self) -> None:
        await self._client.close()


def _entry(lease: Lease) -> Entry:
    whose = lease.whose() or Odd("name", "it is not named as that of a card")
    content = lease.card
    return Entry(lease.name, lease.metadata.resource_version, whose, len(content), content)

"""A worker's side: one key that goes with a lease."""

import asyncio
import logging
import secrets
from functools import partial
from typing import Final

from common.aio.supervised import is_cancelled, supervise
from common.discovery.base import CardPublisher
from common.discovery.etcd.client import EtcdClient, EtcdRefusedError
from common.discovery.etcd.keys import key_of
from common.discovery.renewal import keep_renewing
from common.discovery.seal import seal
from common.errors import DiscoveryError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import WorkerCard

logger = logging.getLogger(__name__)

LEASE_S: Final = 10
"""After so long without a renewal etcd deletes a card. It may take longer, never less."""

WITHDRAW_S: Final = 5.0
"""How long a leaving worker waits for an etcd that does not answer."""


class EtcdCardPublisher(CardPublisher):
    """Publishes one card as ``PREFIX/WORKER_ID/INCARNATION``."""

    def __init__(
        self, client: EtcdClient, prefix: str, key: FleetKey | None, *, renew_s: float
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._key = key
        self._renew_s = renew_s
        self._name = b""
        self._content = b""
        self._lease = 0  # none
        self._put_at = 0  # revision of our last put; none
        self._withdrawn = False
        self._one_at_a_time = asyncio.Lock()
        self._putting: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def check(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        name = key_of(self._prefix, worker_id, incarnation)
        try:
            await self._client.check_put(name)
        except DiscoveryError as error:
            raise DiscoveryError(f"card can't be put at {name.decode()}: {error}") from error

    async def publish(self, card: WorkerCard) -> None:
        name = key_of(self._prefix, card.worker_id, card.incarnation)
        async with self._one_at_a_time:
            if self._withdrawn:
                return
            self._name, self._content, self._put_at = name, seal(card, self._key), 0
            self._putting = asyncio.create_task(self._put(), name="put-card")
            try:
                await self._putting
            except DiscoveryError as error:
                raise DiscoveryError(f"card can't be put at {name.decode()}: {error}") from error
            except asyncio.CancelledError:
                if not self._has_left() or is_cancelled():
                    raise
            if self._renewing is None and not self._withdrawn:
                work = supervise("card renewal", partial(keep_renewing, self._renew, self._renew_s))
                self._renewing = asyncio.create_task(work, name="renew-card")

    async def withdraw(self) -> None:
        self._withdrawn = True
        working = [task for task in (self._putting, self._renewing) if task is not None]
        for task in working:
            task.cancel()
        try:
            await asyncio.gather(*working, return_exceptions=True)
            async with asyncio.timeout(WITHDRAW_S), self._one_at_a_time:
                if self._lease:
                    # A put that was given up under way finds no lease, so it does nothing.
                    await self._client.revoke(self._lease)
        except (DiscoveryError, TimeoutError) as error:
            logger.warning(
                "the card can't be withdrawn, its lease will end: %s",
                str(error) or "etcd does not answer",
            )
        finally:
            await self._client.close()

    def _has_left(self) -> bool:
        """It may have done so during an await."""
        return self._withdrawn

    async def _put(self) -> None:
        """Put the card, with a new lease if there is none or it is over."""
        for last in (False, True):
            if not self._lease:
                # Known before it is asked for, so that it can be revoked in any case.
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
                "card %s was lost or changed by somebody else: written again", self._name.decode()
            )

"""A worker's side: one Lease object, renewed while the worker lives."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine
from typing import Final

from common.aio.supervised import stop_tasks
from common.discovery.base import RenewedPublisher
from common.discovery.kubernetes.client import KubernetesRefusedError, LeaseClient
from common.discovery.kubernetes.leases import Pod, check_names, name_of, renewal, whole
from common.discovery.sealed_cards import seal
from common.errors import DiscoveryError
from common.fleet_key import FleetKey
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import WorkerCard

logger = logging.getLogger(__name__)

SWEEP_S: Final = 600.0  # leases of the dead are removed after at most three times this long


class KubernetesCardPublisher(RenewedPublisher):
    """Publishes one card as a Lease. Writes complete in tasks of their own: the server could
    execute a cancelled one later, and recreate a deleted Lease."""

    place = "Kubernetes"

    def __init__(
        self,
        client: LeaseClient,
        labels: dict[str, str],
        key: FleetKey | None,
        pod: Pod | None,
        *,
        renew_s: float,
        sweep_s: float = SWEEP_S,
    ) -> None:
        super().__init__(key, renew_s)
        self._client = client
        self._labels = labels
        self._pod = pod
        self._sweep_s = sweep_s
        self._card: WorkerCard | None = None  # nothing is published
        self._version = ""  # of our Lease as we left it; unknown
        self._one_at_a_time = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()

    async def check(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        check_names(worker_id, incarnation)
        lease = self._lease(worker_id, incarnation, b"{}")
        try:
            await self._client.create(lease, dry_run=True)
        except KubernetesRefusedError as error:
            if not error.conflicts:  # it is there already, and ours
                raise self._unwritten(error) from error
        except DiscoveryError as error:
            raise self._unwritten(error) from error

    async def publish(self, card: WorkerCard) -> None:
        check_names(card.worker_id, card.incarnation)
        try:
            await self._to_its_end(self._publish(card))
        except DiscoveryError as error:
            raise self._unwritten(error) from error
        self.keep_renewed(sweep=self._sweep)

    async def _remove(self) -> None:
        if self._writes:
            await asyncio.wait(self._writes)
        if self._card is not None:
            await self._client.delete(name_of(self._card.worker_id, self._card.incarnation))

    async def _close(self) -> None:
        await stop_tasks(self._writes)
        await self._client.close()

    async def _to_its_end(self, write: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(write, name="write-card")
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        task.add_done_callback(_looked_at)
        await asyncio.wait({task})
        if not task.cancelled():  # as it is if it has not ended when we are withdrawn
            task.result()

    async def _publish(self, card: WorkerCard) -> None:
        async with self._one_at_a_time:
            if not self.withdrawn:
                self._card, self._version = card, ""
                await self._write()

    async def _renew(self) -> None:
        await self._to_its_end(self._renew_now())

    async def _renew_now(self) -> None:
        async with self._one_at_a_time:
            card, before = self._card, self._version
            if self.withdrawn or card is None:
                return
            if not before:  # the last try may have written it
                await self._write()
                return
            self._version = ""
            try:
                name = name_of(card.worker_id, card.incarnation)
                self._version = await self._client.patch(name, renewal(before))
                return
            except KubernetesRefusedError as error:
                if not error.not_found and not error.conflicts:
                    raise
            await self._write()
        DISCOVERY_ERRORS.labels("lost").inc()
        logger.warning(
            "the card in Lease %s was lost or changed by another process; rewriting it", name
        )

    async def _write(self) -> None:
        """Write the complete Lease, whether it exists or not."""
        card = self._card
        assert card is not None
        lease = self._lease(card.worker_id, card.incarnation, seal(card, self.key))
        name = name_of(card.worker_id, card.incarnation)
        for last in (False, True):
            try:
                self._version = await self._client.patch(name, lease)
                return
            except KubernetesRefusedError as error:
                if not error.not_found:
                    raise
            try:
                self._version = await self._client.create(lease)
                return
            except KubernetesRefusedError as error:
                if last or not error.conflicts:
                    raise

    def _lease(
        self, worker_id: WorkerId, incarnation: Incarnation, content: bytes
    ) -> dict[str, object]:
        return whole(
            worker_id,
            incarnation,
            content,
            labels=self._labels,
            pod=self._pod,
        )

    def _unwritten(self, error: DiscoveryError) -> DiscoveryError:
        where = self._client.namespace
        return DiscoveryError(f"card can't be written to a Lease in {where}: {error}")

    async def _sweep(self) -> None:
        """Delete Leases of killed workers without a Pod, or with a living one. A worker that was
        only suspended creates its Lease again."""
        before: dict[str, str] = {}
        while True:
            await asyncio.sleep(self._sweep_s * random.uniform(1, 1.5))
            now: dict[str, str] = {}
            try:
                async with contextlib.aclosing(self._client.read()) as pages:
                    async for leases in pages:
                        for lease in leases:
                            if lease.whose() is None:
                                continue
                            now[lease.name] = lease.metadata.resource_version
                            if now[lease.name] == before.get(lease.name):
                                await self._client.delete(lease.name, unless_changed=lease)
                                logger.info("deleted the stale Lease %s", lease.name)
                before = now
            except DiscoveryError as error:
                logger.debug("no Leases of dead workers were deleted: %s", error)


def _looked_at(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a write without a waiter, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()

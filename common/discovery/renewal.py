"""Renewing a lease for as long as a worker lives."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from common.errors import DiscoveryError
from common.observability.telemetry import DISCOVERY_ERRORS

logger = logging.getLogger(__name__)


async def keep_renewing(renew: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Renew again and again, whatever goes wrong: the disk may be full or etcd gone, and the
    operator may put that right.

    Args:
        renew: may raise an OSError or a DiscoveryError.
        every_s: seconds between two renewals.
    """
    said: set[str] = set()
    while True:
        await asyncio.sleep(every_s)
        try:
            await renew()
        except (OSError, DiscoveryError) as error:
            DISCOVERY_ERRORS.labels("renewal").inc()
            if str(error) not in said:
                said.add(str(error))
                logger.warning("the lease of the card can't be renewed: %s", error)
        else:
            said.clear()

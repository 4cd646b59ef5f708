"""Follows discovery: whatever changes there is told to those whom it concerns."""

import logging
from collections.abc import Callable

from common.aio.supervised import supervise
from common.discovery.base import CardChange, CardWatcher
from common.errors import DiscoveryError
from common.observability.telemetry import INTERNAL_ERRORS

logger = logging.getLogger(__name__)


async def follow(watcher: CardWatcher, apply: Callable[[CardChange], None]) -> None:
    """Follow discovery until cancelled.

    Args:
        apply: is told of each change.

    Raises:
        DiscoveryError: at first sight, cards can't be read or can't be trusted.
    """

    async def following() -> None:
        async for change in watcher.changes():
            try:
                apply(change)
            except Exception:  # counted; a card that we stumble over keeps no other worker out
                INTERNAL_ERRORS.labels("discovery").inc()
                logger.exception("a change in discovery was not followed: %r", change)

    await supervise("discovery", following, fatal=(DiscoveryError,))

"""What the router does by the clock: old predictions go, swept memory is freed, feeds tick."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from common.identity import WorkerId
from frontend.router.events import Feed
from frontend.router.index import BlockIndexes

_PAUSE_S = 0.25
_EXPIRE_SLICE = 16
"""Requests whose predictions expire at a time."""

_SWEEP_SLICE = 2_000
"""Blocks swept at a time: well below a millisecond, between which others run."""


async def keep_house(
    indexes: BlockIndexes, feeds: Mapping[WorkerId, Feed], clock: Callable[[], float]
) -> None:
    """Look after indexes and feeds for ever.

    Args:
        feeds: those of the fleet, a live view.
        clock: monotonic seconds.
    """
    while True:
        await asyncio.sleep(_PAUSE_S)
        now = clock()
        for feed in list(feeds.values()):
            feed.tick(now)
        await _in_slices(partial(indexes.predicted.expire, now, _EXPIRE_SLICE))
        for index in (indexes.known, indexes.predicted.index):
            await _in_slices(partial(index.sweep, _SWEEP_SLICE))


async def _in_slices(work: Callable[[], bool]) -> None:
    """Call until it says that nothing is left, letting others run in between."""
    more = True
    while more:
        more = work()
        await asyncio.sleep(0)

"""Media that come with their content, each processed once for all who show it.

What is kept is used; what is in flight for another request is waited for; the rest is
processed in batches.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final

from common.identity import MmHash
from common.lru import Lru
from common.media.cache_partition import Partition
from common.observability.telemetry import PREPROCESSED
from frontend.fetch import for_user
from frontend.media_limits import MediaError, RequestLimitError
from frontend.processing.backends import Backend
from frontend.processing.batch import Batch, MediaOptions, Processed
from frontend.processing.flights import Flights, Seats
from frontend.processing.prompt_media import Shown
from frontend.processing.shared_media import SharedMedia
from frontend.processing.store import ArenaStore, ProcessedStore

HASHES_KEPT: Final = 100_000
"""Media whose hash is known by what they are before they are decoded, so that a repeat needs no
decoding."""


class ProcessedOnce:
    """What was processed, is, or will be. For one event loop."""

    def __init__(self, store: ProcessedStore, backend: Backend) -> None:
        """
        Args:
            store: where the backend keeps what it makes.
            backend: does the work.
        """
        self._store = store
        self._backend = backend
        self._hashes: Lru[Hashable, MmHash] = Lru(HASHES_KEPT)
        shared = None
        if isinstance(store, ArenaStore) and store.directory is not None:
            shared = SharedMedia(store.directory, store)
        self._flights = Flights(backend, self._hashes, shared)

    async def obtain(
        self, shown: Sequence[Shown], options: MediaOptions, partition: Partition
    ) -> list[Processed]:
        """Media of one request, processed, in its order.

        Raises:
            VLLMClientError: a medium is refused; says which.
            ValueError: a medium is no good; a 400.
            MmRouterError: other errors.
        """
        found: dict[Hashable, Processed] = {}
        missing: dict[Hashable, Shown] = {}
        for each in shown:
            if each.key in found or each.key in missing:
                continue
            if (kept := self._kept(each.key)) is None:
                missing[each.key] = each
            else:
                found[each.key] = kept
        PREPROCESSED.labels("kept").inc(len(found))
        with self._flights.board(missing) as seats:
            fresh = [missing[key] for key in seats.fresh]
            for some in _spread(fresh, self._backend.width):
                batch = Batch(some[0].modality, [each.medium for each in some], options, partition)
                self._flights.begin(batch, [each.key for each in some])
            for key, each in missing.items():
                found[key] = await self._landed(seats, each, options, partition)
        return [found[each.key] for each in shown]

    async def close(self) -> None:
        """Stop waiting for what is being processed."""
        await self._flights.close()

    def forget(self) -> None:
        """Decode everything anew from now on."""
        self._hashes.clear()

    def _kept(self, key: Hashable) -> Processed | None:
        mm_hash = self._hashes.get(key)
        return None if mm_hash is None else self._store.get_now(mm_hash)

    async def _landed(
        self, seats: Seats, shown: Shown, options: MediaOptions, partition: Partition
    ) -> Processed:
        try:
            return await seats.landed(shown.key)
        except RequestLimitError as error:
            if shown.key in seats.fresh:
                raise for_user(error, shown.place) from error
        except MediaError as error:
            raise for_user(error, shown.place) from error
        # The request that it was begun for may not have it; this one may.
        (again,) = await self.obtain([shown], options, partition)
        return again


_MOST_AT_ONCE = 4
"""Media of a batch. The first of a long document are processed while the others are decoded, and
media of other requests come in between. All at once would take longer too: the processor puts their
tensors together, in memory that is new each time.
"""


def _spread(shown: Sequence[Shown], width: int) -> Iterator[list[Shown]]:
    """Batches of each modality, as many as can be worked on at the same time or more."""
    by_modality: dict[str, list[Shown]] = {}
    for each in shown:
        by_modality.setdefault(each.modality, []).append(each)
    for members in by_modality.values():
        size = min(-(-len(members) // width), _MOST_AT_ONCE)
        for start in range(0, len(members), size):
            yield members[start : start + size]

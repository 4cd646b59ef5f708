"""Single-flight processing of media that come with their content.

Kept media are reused; media in flight for another request, or in another process of this frontend,
are awaited; the rest is processed in batches.

``SingleFlight`` of ``frontend/fetch/``, whose calls are a coroutine each, does not fit:

- A batch carries many keys. They land together, or each by itself if the batch fails.
- There the last caller to leave cancels a call. A thread or process at work on a batch can't be
  cancelled, and its results are kept, so later requests still join. Only a batch that has not begun
  is skipped. That is decided off the event loop where it would begin, so a request may join between
  that and its landing; then the batch starts again.
"""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final

from vllm.exceptions import VLLMClientError

from common.aio.cleanup import Released
from common.aio.supervised import stop_tasks
from common.errors import MmRouterError, OverloadedError
from common.identity import MmHash
from common.lru import Lru
from common.media.cache_partition import Partition
from common.observability.telemetry import PREPROCESSED
from common.observability.tracing import current, link_to
from common.transfer.shared_arena import key_name
from frontend.fetch import MISLED_DECODER_ERRORS, for_user
from frontend.media_limits import MediaError, RequestLimitError
from frontend.processing.backends import Backend
from frontend.processing.batch import Batch, MediaOptions, Processed, check_tokens
from frontend.processing.errors import AbandonedError
from frontend.processing.prompt_media import Shown
from frontend.processing.store import ArenaStore, ProcessedStore

logger = logging.getLogger(__name__)

HASHES_KEPT: Final = 100_000
"""Media whose hash is known before they are decoded, so that a repeat needs no decoding."""

_FOR_USERS = (MmRouterError, ValueError, VLLMClientError, *MISLED_DECODER_ERRORS)
"""Errors that describe a fault of a medium, and their causes."""


class _Flight:
    """One medium in flight, with the number of its waiters."""

    def __init__(self) -> None:
        self.waiters = 0
        self.outcome: asyncio.Future[Processed] = asyncio.get_running_loop().create_future()
        self.span = current()  # of the first request


class Flights:
    """Media in flight, by key. For one event loop."""

    def __init__(
        self, backend: Backend, hashes: Lru[Hashable, MmHash], store: ProcessedStore
    ) -> None:
        """``hashes`` receives the hash of each result, which the backend keeps in ``store``."""
        self._backend = backend
        self._hashes = hashes
        self._store = store
        # Of the other processes of this frontend, if there are any.
        self._claims = store.directory if isinstance(store, ArenaStore) else None
        self._flights: dict[Hashable, _Flight] = {}
        self._running: set[asyncio.Task[None]] = set()

    def board(self, keys: Iterable[Hashable]) -> "Seats":
        """Join flights, and create those that are missing, which the caller must begin."""
        seats = Seats()
        for key in keys:
            flight = self._flights.get(key)
            if flight is None:
                flight = self._flights[key] = _Flight()
                seats.fresh.append(key)
            else:
                link_to(flight.span)
            if flight.waiters:
                PREPROCESSED.labels("shared").inc()
            seats.take(key, flight)
        return seats

    def begin(self, batch: Batch, keys: Sequence[Hashable], turns: asyncio.Semaphore) -> None:
        """Process a batch for the flights of ``keys``, in their order. ``turns`` belongs to the
        request: it limits how many of its batches are decoded ahead.
        """
        task = asyncio.create_task(self._in_turn(batch, keys, turns))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Stop waiting for batches under way."""
        await stop_tasks(self._running)

    async def _in_turn(
        self, batch: Batch, keys: Sequence[Hashable], turns: asyncio.Semaphore
    ) -> None:
        async with turns:
            await self._run(batch, keys)

    async def _run(self, batch: Batch, keys: Sequence[Hashable], *, again: bool = False) -> None:
        """Process a batch and land its flights in any case."""
        flights = [self._flights[key] for key in keys]

        def abandoned() -> bool:
            return not any(flight.waiters for flight in flights)

        try:
            if abandoned():  # before it is decoded
                raise AbandonedError("nobody waits for it")
            found = await self._elsewhere(keys)
            left = [index for index, key in enumerate(keys) if key not in found]
            if not again:
                PREPROCESSED.labels("kept").inc(len(found))
                PREPROCESSED.labels("processed").inc(len(left))
            if left:
                rest = dataclasses.replace(batch, media=[batch.media[index] for index in left])
                made = await self._backend.run(rest, abandoned)
                found.update(zip([keys[index] for index in left], made, strict=True))
            processed = [found[key] for key in keys]
        except AbandonedError as error:
            if abandoned():
                _forget_frames(error)
                self._land(keys, [error] * len(keys))
            else:  # a request joined at the last moment
                await self._run(batch, keys, again=True)
        except Exception as error:  # noqa: BLE001 # raised where the flight is waited for
            _forget_frames(error)
            if len(keys) == 1 or isinstance(error, (RequestLimitError, OverloadedError)):
                self._land(keys, [error] * len(keys))
            else:
                # Retry one by one: not all need be at fault, and other requests may wait for the
                # rest.
                for medium, key in zip(batch.media, keys, strict=True):
                    alone = dataclasses.replace(batch, media=[medium])
                    await self._run(alone, [key], again=True)
        else:
            self._land(keys, processed)

    async def _elsewhere(self, keys: Sequence[Hashable]) -> dict[Hashable, Processed]:
        """Return results of other processes, waiting for those in progress. The rest is claimed
        here.
        """
        found: dict[Hashable, Processed] = {}
        if self._claims is not None:
            assert isinstance(self._store, ArenaStore), "others share an arena"
            for key in sorted(keys, key=lambda key: key_name(key) or b""):
                if (lease := await self._claims.claim(key)) is not None:
                    found[key] = self._store.view(lease)
        return found

    def _land(self, keys: Sequence[Hashable], outcomes: Sequence[Processed | Exception]) -> None:
        for key, outcome in zip(keys, outcomes, strict=True):
            future = self._flights.pop(key).outcome
            made = outcome if isinstance(outcome, Processed) else None
            if self._claims is not None:
                self._claims.landed(key, None if made is None else made.mm_hash)
            if isinstance(outcome, Processed):
                self._hashes.put(key, outcome.mm_hash)
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
                future.exception()  # mark as retrieved: waiters may be gone


class Seats(Released):
    """One request's places in flights, released at the end of a ``with``.

    ``fresh`` has the keys of the flights created for this request.
    """

    def __init__(self) -> None:
        self.fresh: list[Hashable] = []
        self._boarded: dict[Hashable, _Flight] = {}

    def take(self, key: Hashable, flight: _Flight) -> None:
        """Wait for a flight from now on."""
        flight.waiters += 1
        self._boarded[key] = flight

    async def landed(self, key: Hashable) -> Processed:
        """Wait for a medium. Raises the error of its processing."""
        return await asyncio.shield(self._boarded[key].outcome)

    def release(self) -> None:
        for flight in self._boarded.values():
            flight.waiters -= 1
        # Break a cycle: an error refers to the frames that hold these seats, and a flight to the
        # error. Their memory would count in the budgets until garbage collection.
        self._boarded.clear()


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks, which hold decoded media for as long as a flight holds the error."""
    while error is not None and error.__traceback__ is not None:
        if not isinstance(error, _FOR_USERS):
            logger.error("processing of media failed", exc_info=error)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class ProcessedOnce:
    """Kept, in-flight and new results of processing. For one event loop."""

    def __init__(self, store: ProcessedStore, backend: Backend, max_tokens: int | None) -> None:
        """The backend keeps its results in ``store``. ``max_tokens`` is the longest prompt; None if
        media don't count.
        """
        self._store = store
        self._max_tokens = max_tokens
        self._backend = backend
        self._hashes: Lru[Hashable, MmHash] = Lru(HASHES_KEPT)
        self._flights = Flights(backend, self._hashes, store)

    async def obtain(
        self, shown: Sequence[Shown], options: MediaOptions, partition: Partition
    ) -> list[Processed]:
        """Return the media of one request, processed, in its order.

        Raises:
            VLLMClientError: a medium is refused; names it.
            ValueError: a medium is unusable; a 400.
            RequestRejectedError: the media exceed a prompt; remaining batches are not begun.
            MmRouterError: other errors.
        """
        times = Counter(each.key for each in shown)
        tokens = 0

        def count(key: Hashable, processed: Processed) -> Processed:
            nonlocal tokens
            tokens += times[key] * processed.prompt_tokens
            check_tokens(tokens, self._max_tokens)
            return processed

        found: dict[Hashable, Processed] = {}
        missing: dict[Hashable, Shown] = {}
        for each in shown:
            if each.key in found or each.key in missing:
                continue
            if (kept := self._kept(each.key)) is None:
                missing[each.key] = each
            else:
                found[each.key] = count(each.key, kept)
        PREPROCESSED.labels("kept").inc(len(found))
        with self._flights.board(missing) as seats:
            fresh = [missing[key] for key in seats.fresh]
            turns = asyncio.Semaphore(self._backend.width + _AHEAD)
            for some in _spread(fresh, self._backend.width):
                batch = Batch(some[0].modality, [each.medium for each in some], options, partition)
                self._flights.begin(batch, [each.key for each in some], turns)
            for key, each in missing.items():
                found[key] = count(key, await self._landed(seats, each, options, partition))
        return [found[each.key] for each in shown]

    async def close(self) -> None:
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
        # The limit belongs to the other request; this one may have it.
        (again,) = await self.obtain([shown], options, partition)
        return again


_MAX_AT_ONCE = {"image": 4}
"""Media of a batch, by modality. The first of a long document are processed while the others are
decoded, and media of other requests come in between. All at once would take longer too: the
processor puts their tensors together, in memory that is new each time.

A sound or a film is a batch by itself, since only its processing tells how many tokens it has: if
they are too many for a prompt, those after it are not begun."""

_AHEAD = 2
"""Batches of a request decoded, or in decoding, beyond those that are processed."""


def _spread(shown: Sequence[Shown], width: int) -> Iterator[list[Shown]]:
    """Yield batches of each modality, at least as many as run concurrently if possible."""
    by_modality: dict[str, list[Shown]] = {}
    for each in shown:
        by_modality.setdefault(each.modality, []).append(each)
    for modality, members in by_modality.items():
        size = min(-(-len(members) // width), _MAX_AT_ONCE.get(modality, 1))
        for start in range(0, len(members), size):
            yield members[start : start + size]

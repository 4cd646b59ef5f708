"""Media that come with their content, each processed once for all who show it.

What is kept is used; what is in flight for another request, or in another process of this
frontend, is waited for; the rest is processed in batches.

Why this is not the ``SingleFlight`` of ``frontend/fetch/``, whose calls are a coroutine each:

- A batch carries many keys. They land together, or each by itself if the batch fails.
- Whoever leaves last cancels a call there. A thread or a process that is at a batch can't be
  cancelled, and what it makes is kept: who comes now still joins. Only a batch that has not
  begun is left undone. That is found out where it would begin, off the event loop, so somebody
  may come between that and its landing; then it goes off again.
"""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final

from vllm.exceptions import VLLMClientError

from common.aio.cleanup import Released
from common.errors import MmRouterError, OverloadedError, RequestRejectedError
from common.identity import MmHash
from common.lru import Lru
from common.media.cache_partition import Partition
from common.observability.telemetry import PREPROCESSED
from common.observability.tracing import current, link_to
from common.transfer.shared_arena import MediaClaims, key_name
from frontend.fetch import MISLED_DECODER_ERRORS, for_user
from frontend.media_limits import MediaError, RequestLimitError
from frontend.processing.backends import Backend
from frontend.processing.batch import Batch, MediaOptions, Processed
from frontend.processing.errors import AbandonedError
from frontend.processing.prompt_media import Shown
from frontend.processing.store import ArenaStore, ProcessedStore

logger = logging.getLogger(__name__)

HASHES_KEPT: Final = 100_000
"""Media whose hash is known by what they are before they are decoded, so that a repeat needs no
decoding."""


class SharedMedia:
    """Asks the other processes of this frontend what they have, or are at, before a medium is
    processed. For one event loop.
    """

    def __init__(self, directory: MediaClaims, store: ArenaStore) -> None:
        """
        Args:
            store: over the arena of the directory.
        """
        self._directory = directory
        self._store = store

    async def claim(self, key: Hashable) -> Processed | None:
        """A medium that is kept, or None if it is to be processed here: then :meth:`landed` must
        follow. Waits for the process that is at it.

        Who claims several does so in the order of :meth:`order`, or two could wait for each other.
        """
        name = key_name(key)
        lease = None if name is None else await self._directory.claim(name)
        return None if lease is None else self._store.view(lease)

    def landed(self, key: Hashable, mm_hash: MmHash | None) -> None:
        """A medium was processed here.

        Args:
            mm_hash: its hash; None if nothing came of it.
        """
        name = key_name(key)
        if name is not None:
            self._directory.landed(name, mm_hash)

    @staticmethod
    def order(key: Hashable) -> bytes:
        """Equal in all processes."""
        return key_name(key) or b""


_FOR_USERS = (MmRouterError, ValueError, VLLMClientError, *MISLED_DECODER_ERRORS)
"""Errors that say what is wrong with a medium, and those that they came from."""


class _Flight:
    """One medium being processed, for everybody who wants it.

    Attributes:
        waiters: how many do, at this moment.
        outcome: what comes of it.
    """

    def __init__(self) -> None:
        self.waiters = 0
        self.outcome: asyncio.Future[Processed] = asyncio.get_running_loop().create_future()
        self.span = current()  # of the request that it was made for


class Flights:
    """The flights of one frontend, by key. For one event loop."""

    def __init__(
        self, backend: Backend, hashes: Lru[Hashable, MmHash], shared: SharedMedia | None = None
    ) -> None:
        """
        Args:
            backend: does the work.
            hashes: is told the hash of whatever lands.
            shared: what other processes of this frontend have or are at, if there are any.
        """
        self._backend = backend
        self._hashes = hashes
        self._shared = shared
        self._flights: dict[Hashable, _Flight] = {}
        self._running: set[asyncio.Task[None]] = set()

    def board(self, keys: Iterable[Hashable]) -> "Seats":
        """Join what is in flight, and make flights for the rest, which the caller must begin."""
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
        """Process a batch of media whose flights wait for it, in their order.

        Args:
            turns: of the request's batches, so that few of many are decoded ahead of the rest.
        """
        task = asyncio.create_task(self._in_turn(batch, keys, turns))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Stop waiting for batches that are under way."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _in_turn(
        self, batch: Batch, keys: Sequence[Hashable], turns: asyncio.Semaphore
    ) -> None:
        async with turns:
            await self._run(batch, keys)

    async def _run(self, batch: Batch, keys: Sequence[Hashable], *, again: bool = False) -> None:
        """Process a batch and land its flights, whatever happens."""
        flights = [self._flights[key] for key in keys]

        def abandoned() -> bool:
            return not any(flight.waiters for flight in flights)

        try:
            if abandoned():  # before anything of it is decoded
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
                self._land(keys, [error] * len(keys))
            else:  # somebody came at the last moment
                await self._run(batch, keys, again=True)
        except Exception as error:  # noqa: BLE001 # raised where the flight is waited for
            _forget_frames(error)
            if len(keys) == 1 or isinstance(error, (RequestLimitError, OverloadedError)):
                self._land(keys, [error] * len(keys))
            else:
                # Not all of them need be at fault, and others may wait for the rest.
                for medium, key in zip(batch.media, keys, strict=True):
                    alone = dataclasses.replace(batch, media=[medium])
                    await self._run(alone, [key], again=True)
        else:
            self._land(keys, processed)

    async def _elsewhere(self, keys: Sequence[Hashable]) -> dict[Hashable, Processed]:
        """What other processes have made, or are making. The rest nobody else begins."""
        found: dict[Hashable, Processed] = {}
        if self._shared is not None:
            for key in sorted(keys, key=self._shared.order):
                if (kept := await self._shared.claim(key)) is not None:
                    found[key] = kept
        return found

    def _land(self, keys: Sequence[Hashable], outcomes: Sequence[Processed | Exception]) -> None:
        for key, outcome in zip(keys, outcomes, strict=True):
            future = self._flights.pop(key).outcome
            made = outcome if isinstance(outcome, Processed) else None
            if self._shared is not None:
                self._shared.landed(key, None if made is None else made.mm_hash)
            if isinstance(outcome, Processed):
                self._hashes.put(key, outcome.mm_hash)
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
                future.exception()  # seen, also if everybody has gone


class Seats(Released):
    """One request's places in flights, which it leaves at the end of a ``with``.

    Attributes:
        fresh: keys of the flights that were made for this request.
    """

    def __init__(self) -> None:
        self.fresh: list[Hashable] = []
        self._boarded: dict[Hashable, _Flight] = {}

    def take(self, key: Hashable, flight: _Flight) -> None:
        """Wait for a flight from now on."""
        flight.waiters += 1
        self._boarded[key] = flight

    async def landed(self, key: Hashable) -> Processed:
        """What comes of a medium. Raises what its processing raised."""
        return await asyncio.shield(self._boarded[key].outcome)

    def release(self) -> None:
        for flight in self._boarded.values():
            flight.waiters -= 1
        # An error refers to the frames that hold these seats, and a flight to the error: what
        # both hold would wait for the garbage collector, and be missing in the budgets until then.
        self._boarded.clear()


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what was decoded before an error: flights keep it until they are gone."""
    while error is not None and error.__traceback__ is not None:
        if not isinstance(error, _FOR_USERS):
            logger.error("processing of media failed", exc_info=error)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class ProcessedOnce:
    """What was processed, is, or will be. For one event loop."""

    def __init__(self, store: ProcessedStore, backend: Backend, max_tokens: int | None) -> None:
        """
        Args:
            store: where the backend keeps what it makes.
            backend: does the work.
            max_tokens: the longest prompt; None if media do not count.
        """
        self._store = store
        self._max_tokens = max_tokens
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
            RequestRejectedError: the media are longer than a prompt; what is left is not begun.
            MmRouterError: other errors.
        """
        times = Counter(each.key for each in shown)
        tokens = 0

        def count(key: Hashable, processed: Processed) -> Processed:
            nonlocal tokens
            tokens += times[key] * processed.prompt_tokens
            if self._max_tokens is not None and tokens > self._max_tokens:
                raise _too_long(tokens, self._max_tokens)
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


_MOST_AT_ONCE = {"image": 4}
"""Media of a batch, by modality. The first of a long document are processed while the others are
decoded, and media of other requests come in between. All at once would take longer too: the
processor puts their tensors together, in memory that is new each time.

A sound or a film is a batch by itself, since only its processing tells how many tokens it has: if
they are too many for a prompt, those after it are not begun.
"""

_AHEAD = 2
"""Batches of a request that are decoded, or are being decoded, beyond those that are processed."""


def _too_long(tokens: int, max_tokens: int) -> RequestRejectedError:
    return RequestRejectedError(
        f"the maximum context length is {max_tokens} tokens, and media of this request have "
        f"{tokens} at least: send fewer, or shorter ones"
    )


def _spread(shown: Sequence[Shown], width: int) -> Iterator[list[Shown]]:
    """Batches of each modality, as many as can be worked on at the same time or more."""
    by_modality: dict[str, list[Shown]] = {}
    for each in shown:
        by_modality.setdefault(each.modality, []).append(each)
    for modality, members in by_modality.items():
        size = min(-(-len(members) // width), _MOST_AT_ONCE.get(modality, 1))
        for start in range(0, len(members), size):
            yield members[start : start + size]

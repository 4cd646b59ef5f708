"""Single-flight: process each medium once for all requests that want it at the same time.

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
from collections.abc import Hashable, Iterable, Sequence
from types import TracebackType
from typing import Self

from vllm.exceptions import VLLMClientError

from common.errors import MmRouterError, OverloadedError
from common.identity import MmHash
from common.lru import Lru
from common.observability.telemetry import PREPROCESSED
from common.observability.tracing import current, link_to
from frontend.fetch import MISLED_DECODER_ERRORS
from frontend.media_limits import RequestLimitError
from frontend.processing.backends import Backend
from frontend.processing.batch import Batch, Processed
from frontend.processing.errors import AbandonedError
from frontend.processing.shared_media import SharedMedia

logger = logging.getLogger(__name__)

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

    def begin(self, batch: Batch, keys: Sequence[Hashable]) -> None:
        """Process a batch of media whose flights wait for it, in their order."""
        task = asyncio.create_task(self._run(batch, keys))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Stop waiting for batches that are under way."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, batch: Batch, keys: Sequence[Hashable], *, again: bool = False) -> None:
        """Process a batch and land its flights, whatever happens."""
        flights = [self._flights[key] for key in keys]

        def abandoned() -> bool:
            return not any(flight.waiters for flight in flights)

        try:
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


class Seats:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

"""Where batches of media are processed: in this process, or in others."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from vllm.multimodal.media import MediaIO
from vllm.renderers import BaseRenderer

from common.observability.watchdog import allow
from frontend.fetch import Content, current_allowance, seconds_to_process
from frontend.media_limits import FetchPolicy
from frontend.processing.batch import Batch, Processed, process
from frontend.processing.errors import AbandonedError
from frontend.processing.pool import ProcessPool
from frontend.processing.store import ProcessedStore


class Decodes(Protocol):
    """Decodes a medium off the event loop."""

    async def __call__(self, content: Content, media_io: MediaIO[Any]) -> Any:
        """Raises MediaError or ValueError if it is no good."""
        ...


class Backend(Protocol):
    """Where batches are processed."""

    @property
    def width(self) -> int:
        """How many batches it works on at the same time."""
        ...

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        """Process a batch and keep what comes of it.

        Args:
            abandoned: asked, in any thread, before it begins: whether nobody wants it now.

        Raises:
            MediaError, ValueError: a medium is no good.
            OverloadedError: there is no room for what they decode to at this moment.
            AbandonedError: nobody wanted it when its turn came.
            MmRouterError: other errors.
        """
        ...


_AT_THE_THREAD = 2
"""Batches that the renderer's thread is at or has next. More would wait before prompts whose media
are ready: these need the thread too, to be assembled, for a millisecond. So in a burst of new
pictures no engine would get one before the last is processed. With one alone, the thread would
rest until the event loop has time to send the next.
"""


class OwnBackend:
    """The renderer's one processing thread; decoding is done in the media loader's."""

    width = 1

    def __init__(self, renderer: BaseRenderer, store: ProcessedStore, decode: Decodes) -> None:
        self._executor = renderer._mm_executor
        self._processor = renderer.get_mm_processor()
        self._store = store
        self._decode = decode
        self._turns = asyncio.Semaphore(_AT_THE_THREAD)

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        """See :class:`Backend`."""
        decoded = await asyncio.gather(
            *(self._decode(medium.content, medium.media_io) for medium in batch.media)
        )

        def work() -> list[Processed]:
            if abandoned():
                raise AbandonedError("nobody waits for it")
            allow(seconds_to_process(decoded))
            return [self._store.put(each) for each in process(self._processor, batch, decoded)]

        async with self._turns:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class PoolBackend:
    """Processes of our own, which decode too."""

    def __init__(self, pool: ProcessPool, policy: FetchPolicy) -> None:
        self._pool = pool
        self._policy = policy

    @property
    def width(self) -> int:
        """How many processes there are."""
        return self._pool.count

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        """See :class:`Backend`."""
        job = self._pool.submit(batch, abandoned, current_allowance(self._policy))
        return await asyncio.wrap_future(job)

"""Backends that process batches of media: in this process, or in a pool of processes."""

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from vllm.multimodal.media import MediaIO
from vllm.renderers import BaseRenderer

from common.errors import ConfigurationError
from common.observability.telemetry import CHILD_RESTARTS
from common.observability.watchdog import allow
from common.vllm_compat.renderer_patches import HfProcessorRuns, second_processor
from frontend.bounded.child_process import LOST, ChildProcess, ProcessHungError
from frontend.bounded.fork_supply import Forks, ProcessLostError
from frontend.client_turns import ClientTurns
from frontend.fetch import (
    Content,
    RequestAllowance,
    current_allowance,
    seconds_to_process,
)
from frontend.media_limits import Budget
from frontend.processing.batch import Batch, Processed, Processor, in_runs, is_long, process
from frontend.processing.child_messages import StartUp
from frontend.processing.errors import (
    AbandonedError,
    ProcessingFailedError,
)
from frontend.processing.exchange import Exchange
from frontend.processing.store import ProcessedStore

logger = logging.getLogger(__name__)

MODULE: Final = "frontend.processing.child"
"""Module of the processes."""

ATTEMPTS: Final = 2
"""Processes that a batch may kill before the batch itself is blamed."""


class _Job:
    def __init__(
        self, batch: Batch, abandoned: Callable[[], bool], allowance: RequestAllowance
    ) -> None:
        self.batch = batch
        self.abandoned = abandoned
        self.allowance = allowance
        self.outcome: Future[list[Processed]] = Future()


class ProcessPool:
    """Backend on a pool of processes, which decode too and run batches in FIFO order.

    A process that dies or hangs is replaced, and its batch retried once. A hung batch of several
    media fails at once, since the caller retries them one by one.
    """

    def __init__(
        self,
        order: StartUp,
        count: int,
        store: ProcessedStore,
        hf_runs: HfProcessorRuns,
        decoding: Budget,
    ) -> None:
        """Start ``count`` processes: seconds, so not on the event loop. The arena in ``order``
        belongs to ``store``. Raises ConfigurationError if the processes don't start.
        """
        self._order = order
        self._exchange = Exchange(store, hf_runs, decoding, order.policy.decode_timeout_s)
        self._replacing = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._forks = Forks(MODULE)
        self._processes = dict(enumerate(_start(order, count, self._forks)))
        self._clients = ClientTurns(_AT_THE_THREAD * count)
        logger.info("media are processed by processes %s", ", ".join(map(str, self.pids)))
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"media-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def width(self) -> int:
        return len(self._threads)

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._processes.values()]

    def submit(
        self, batch: Batch, abandoned: Callable[[], bool], allowance: RequestAllowance
    ) -> Future[list[Processed]]:
        """Process a batch; the result has one item for each medium, in order. ``abandoned`` is
        called in a thread before the batch begins.

        The future raises:
            MediaError: a limit or a decoder refuses a medium.
            OverloadedError: no room for its decoded pixels now.
            ValueError: vLLM refuses it.
            AbandonedError: no request waited for it any more.
            ProcessingFailedError: an internal error, or processes die or hang.
        """
        job = _Job(batch, abandoned, allowance)
        self._jobs.put(job)
        return job.outcome

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        """Process a batch within the allowance of this task's request. Raises as :meth:`submit`."""
        allowance = current_allowance(self._order.policy)
        async with self._clients.of_client():
            return await asyncio.wrap_future(self.submit(batch, abandoned, allowance))

    def close(self) -> None:
        """End all processes. Batches under way fail."""
        self._forks.refuse()  # so that no thread waits for a replacement
        with self._replacing:
            self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        with ThreadPoolExecutor(self.width) as threads:
            list(threads.map(ChildProcess.end, self._processes.values()))
        for thread in self._threads:
            thread.join()
        for each in self._processes.values():
            each.close()
        self._forks.close()
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None and job.outcome.set_running_or_notify_cancel():
                job.outcome.set_exception(ProcessingFailedError("the frontend is shutting down"))

    def _serve(self, index: int) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.outcome.set_running_or_notify_cancel():
                pass  # the frontend is closing
            elif job.abandoned():
                job.outcome.set_exception(AbandonedError("nobody waits for it"))
            else:
                try:
                    job.outcome.set_result(self._run(index, job))
                except Exception as error:  # noqa: BLE001 # raised where the future is waited for
                    job.outcome.set_exception(error)
            del job  # or it would hold its items until the next job

    def _run(self, index: int, job: _Job) -> list[Processed]:
        hung = False
        for _ in range(ATTEMPTS):
            try:
                return self._exchange.run(self._processes[index], job.batch, job.allowance)
            except ProcessHungError as error:
                hung = True
                self._replace(index, str(error))
                if len(job.batch.media) > 1:
                    break  # its media are tried one by one
            except LOST:
                self._replace(index, "died")
        raise ProcessingFailedError(
            f"a process hung in processing this {job.batch.modality}"
            if hung
            else f"a process died of processing this {job.batch.modality}, and so did the next"
        )

    def _replace(self, index: int, why: str) -> None:
        lost = self._processes[index]
        lost.end()
        lost.close()
        with self._replacing:
            if self._closed:
                raise ProcessingFailedError("the frontend is shutting down")
            CHILD_RESTARTS.labels("media").inc()
            logger.warning("process %d, which processes media, %s: replacing it", lost.pid, why)
            try:
                fresh = self._processes[index] = ChildProcess(self._order, self._forks)
            except ProcessLostError as error:
                # The next batch finds the lost one closed and tries again.
                raise ProcessingFailedError(str(error)) from error
        try:
            fresh.wait_until_ready()
        except ProcessLostError as error:
            # The next batch finds it dead and tries again.
            raise ProcessingFailedError(str(error)) from error


def _start(order: StartUp, count: int, forks: Forks) -> list[ChildProcess]:
    """Return ready processes. Raises ConfigurationError if they don't start."""
    attempts = ATTEMPTS
    while True:
        attempts -= 1
        processes: list[ChildProcess] = []
        try:
            for _ in range(count):
                processes.append(ChildProcess(order, forks))
            with ThreadPoolExecutor(count) as threads:
                for ready in [threads.submit(each.wait_until_ready) for each in processes]:
                    ready.result()
            return processes
        except ProcessLostError as error:
            if not attempts:
                forks.refuse()
            for each in processes:
                each.end()
                each.close()
            if not attempts:
                forks.close()
                raise ConfigurationError(f"{error}: see its messages above") from error
            # The kernel may have killed one for memory.
            logger.warning("%s: starting all again", error)


Decodes: TypeAlias = Callable[[Content, MediaIO[Any]], Awaitable[Any]]
"""Decodes a medium off the event loop. Raises MediaError or ValueError for an unusable one."""


class Backend(Protocol):
    """Processes batches."""

    @property
    def width(self) -> int:
        """Number of batches processed concurrently."""
        ...

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        """Process a batch and keep the results. ``abandoned`` is called in any thread before it
        begins.

        Raises:
            MediaError, ValueError: a medium is unusable.
            OverloadedError: no room for the decoded media now.
            AbandonedError: no request waited for it any more.
            MmRouterError: other errors.
        """
        ...


_AT_THE_THREAD = 2
"""Batches that a thread runs or has next. Further ones would delay prompts whose media
are ready, which need the thread for a millisecond to be assembled: in a burst of new pictures no
engine would get a prompt before the last picture is processed. With one alone, the thread would
idle until the event loop sends the next. As many are of one client: eight connections with pictures
of 15 megapixels, of 12 KB each, kept others' waiting for 6 s."""

_PARALLEL_NUMBA: Final = "vllm.transformers_utils.processors.kimi_k25_vision_fused"
"""Kimi's processors run it; numba aborts the process where two threads are in it."""


class _Lane:
    """A thread with a processor of its own, and the batches that wait for it."""

    def __init__(self, thread: Executor, processor: Callable[[], Processor]) -> None:
        """``processor`` is called in the thread."""
        self._thread = thread
        self._processor = processor
        self._turns = asyncio.Semaphore(_AT_THE_THREAD)
        self._clients = ClientTurns(_AT_THE_THREAD)

    async def run(self, work: Callable[[Processor], list[Processed]]) -> list[Processed]:
        async with self._clients.of_client(), self._turns:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, lambda: work(self._processor()))


class OwnBackend:
    """Backend on threads of this process; the media loader's threads decode.

    The renderer's one thread processes pictures and short sounds. Films and large media, which take
    seconds, have another, so that others' don't wait for them.
    """

    width = 1

    def __init__(
        self,
        renderer: BaseRenderer,
        store: ProcessedStore,
        decode: Callable[[Content, MediaIO[Any], Callable[[], object]], Awaitable[Any]],
        long_thread: Executor,
        hf_runs: HfProcessorRuns,
    ) -> None:
        """``decode`` calls its last argument before it begins. ``long_thread`` is one thread. Takes
        seconds: copying a tokenizer of 151,000 tokens holds the GIL for two, so it is not left to
        the first film.
        """
        self._store = store
        self._decode = decode
        self._short = _Lane(renderer._mm_executor, renderer.get_mm_processor)
        self._long = self._short
        if _PARALLEL_NUMBA not in sys.modules:
            second = second_processor(renderer, hf_runs)
            self._long = _Lane(long_thread, lambda: second)

    async def run(self, batch: Batch, abandoned: Callable[[], bool]) -> list[Processed]:
        def begin() -> None:
            if abandoned():
                raise AbandonedError("nobody waits for it")

        decoded = await asyncio.gather(
            *(self._decode(medium.content, medium.media_io, begin) for medium in batch.media)
        )

        def work(some: Sequence[Any], processor: Processor) -> list[Processed]:
            begin()
            allow(seconds_to_process(list(some)))
            return [self._store.put(each) for each in process(processor, batch, some)]

        done: list[Processed] = []
        for some in in_runs(decoded):  # so that others' come between large ones
            lane = self._long if is_long(batch.modality, some) else self._short
            done += await lane.run(partial(work, some))
        return done

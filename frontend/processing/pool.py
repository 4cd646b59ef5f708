"""Processes that process media, each with a thread here that talks to it.

Every wait for a process has an end. One that does not answer in time is killed and its
connection shut down, so that whoever reads from it or writes to it sees it gone.
"""

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Final

import cloudpickle

from common.errors import ConfigurationError, OverloadedError
from common.hf_processor_runs import HfProcessorRuns
from common.telemetry import PREPROCESS_RESTARTS
from common.transfer.arena import Lease, ReservedSegment
from common.transfer.codec import decode
from common.transfer.segment import SegmentLayout
from frontend.fetch import RequestAllowance
from frontend.media_limits import MEGAPIXEL, Budget, RefusedError
from frontend.media_processes import (
    Answer,
    BatchFailed,
    Deadline,
    Fault,
    NoRoom,
    Offsets,
    Ready,
    Result,
    Results,
    StartUp,
    Wants,
    Written,
)
from frontend.processing.batch import Batch, Processed
from frontend.processing.errors import (
    AbandonedError,
    ProcessHungError,
    ProcessingFailedError,
    ProcessLostError,
)
from frontend.processing.store import ArenaStore, ProcessedStore

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 2
"""So often a batch may see a process die before the batch is taken to be the reason."""

SECONDS_PER_MEGAPIXEL: Final = 0.25
"""By which a batch may take longer than the deadline says, several times what it needs."""

_COMMAND: Final = [sys.executable, "-m", "frontend.processing.child"]
_START_S: Final = 120.0
_STOP_S: Final = 5.0

_LOST: Final = (EOFError, OSError)
"""How a connection says that the process at its other end is gone."""


class _Process:
    """One process, as the thread that talks to it sees it."""

    def __init__(self, order: StartUp) -> None:
        """Start it; it isn't ready yet."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._popen = subprocess.Popen(
                    [*_COMMAND, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                self._socket.close()
                raise ProcessLostError(f"a process for media can't be started: {error}") from error
        self.connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._order = order

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_until_ready(self) -> None:
        """Raises ProcessLostError if it ends instead, or takes too long."""
        deadline = self.deadline(_START_S)
        try:
            with deadline:
                self.connection.send(self._order)
                answer = self.connection.recv()
                assert isinstance(answer, Ready), answer
        except _LOST as error:
            late = f" within {_START_S:g} s" if deadline.missed else ""
            raise ProcessLostError(f"a process for media did not start{late}") from error

    def deadline(self, seconds: float) -> Deadline:
        """Whatever is said to it inside of this ends in time: it is killed otherwise."""
        return Deadline(seconds, self.kill)

    def kill(self) -> None:
        """End it at once, also if it is stopped; whoever talks to it sees it gone."""
        self._popen.kill()
        # For the case that the kernel can't end it now: it may wait for a disk.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End it; whoever talks to it sees it gone. May be called twice."""
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            try:
                self._popen.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                logger.error("process %d can't be killed: leaving it behind", self.pid)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, once nobody uses it any more. May be called twice."""
        self.connection.close()
        self._socket.close()


class _Job:
    def __init__(
        self, batch: Batch, abandoned: Callable[[], bool], allowance: RequestAllowance
    ) -> None:
        self.batch = batch
        self.abandoned = abandoned
        self.allowance = allowance
        self.outcome: Future[list[Processed]] = Future()


class ProcessPool:
    """Runs batches in as many processes as it is told.

    Batches are taken in the order in which they come. A process that dies is replaced, and
    its batch is given to another one, once. One that hangs is killed, which is the same.

    Attributes:
        restarts: how many were replaced.
    """

    def __init__(
        self,
        order: StartUp,
        count: int,
        store: ProcessedStore,
        hf_runs: HfProcessorRuns,
        decoding: Budget,
    ) -> None:
        """Start the processes. Takes seconds: not on the event loop.

        Args:
            order: what each of them gets.
            count: how many.
            store: keeps what they make; the arena in ``order`` is its own.
            hf_runs: counts their runs of the HF processor.
            decoding: budget of the pixels that they decode.

        Raises:
            ConfigurationError: they don't start.
        """
        self._order = order
        self._store = store
        self._hf_runs = hf_runs
        self._decoding = decoding
        self._timeout_s = order.policy.decode_timeout_s
        self._replacing = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self.restarts = 0
        processes: list[_Process] = []
        try:
            for _ in range(count):
                processes.append(_Process(order))
            with ThreadPoolExecutor(count) as threads:
                for ready in [threads.submit(each.wait_until_ready) for each in processes]:
                    ready.result()
        except ProcessLostError as error:
            for process in processes:
                process.end()
                process.close()
            raise ConfigurationError(f"{error}: see its messages above") from error
        self._processes = dict(enumerate(processes))
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"media-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """How many processes there are."""
        return len(self._threads)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid for process in self._processes.values()]

    def submit(
        self, batch: Batch, abandoned: Callable[[], bool], allowance: RequestAllowance
    ) -> Future[list[Processed]]:
        """Process a batch; the result has one item for each medium, in order.

        Args:
            abandoned: asked, in a thread, before it begins: whether nobody wants it now.
            allowance: of the request whose batch it is.

        The future raises:
            MediaError: a limit or a decoder refuses a medium.
            OverloadedError: there is no room for what it decodes to at this moment.
            ValueError: vLLM refuses it.
            AbandonedError: nobody wanted it.
            ProcessingFailedError: an error of ours, or processes die of it or hang.
        """
        job = _Job(batch, abandoned, allowance)
        self._jobs.put(job)
        return job.outcome

    def close(self) -> None:
        """End all processes. Batches under way fail."""
        with self._replacing:
            self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        with ThreadPoolExecutor(self.count) as threads:
            list(threads.map(_Process.end, self._processes.values()))
        for thread in self._threads:
            thread.join()
        for process in self._processes.values():
            process.close()
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
            del job  # or it would hold the items until the next one comes

    def _run(self, index: int, job: _Job) -> list[Processed]:
        hung = False
        for _ in range(ATTEMPTS):
            try:
                return self._exchange(self._processes[index], job)
            except ProcessHungError as error:
                hung = True
                self._replace(index, str(error))
                if len(job.batch.media) > 1:
                    break  # its media are tried one by one
            except _LOST:
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
            self.restarts += 1
            PREPROCESS_RESTARTS.inc()
            logger.warning("process %d, which processes media, %s: replacing it", lost.pid, why)
            try:
                fresh = self._processes[index] = _Process(self._order)
            except ProcessLostError as error:
                # The next batch finds the lost one closed and tries again.
                raise ProcessingFailedError(str(error)) from error
        try:
            fresh.wait_until_ready()
        except ProcessLostError as error:
            # The next batch finds it dead and tries again.
            raise ProcessingFailedError(str(error)) from error

    def _exchange(self, process: _Process, job: _Job) -> list[Processed]:
        answer = self._results(process, job)
        if isinstance(answer, BatchFailed):
            raise _error(answer)
        self._hf_runs.add(answer.hf_runs)
        updates = cloudpickle.loads(answer.prompt_updates)
        with ExitStack() as stack:
            # May wait for the process of another thread, which has a deadline of its own.
            rooms = self._rooms(answer.items, stack)
            sent = self._write(process, answer.items, rooms)
            return self._collect(answer.items, updates, rooms, sent)

    def _results(self, process: _Process, job: _Job) -> Results | BatchFailed:
        """What the process makes of a batch, if there is room for what it decodes."""
        connection = process.connection
        taken = 0
        try:
            with self._in_time(process) as deadline, self._decoding.reserve() as decoded:
                connection.send(job.batch)
                while isinstance(answer := connection.recv(), Wants):
                    taken += answer.pixels
                    try:
                        job.allowance.take_pixels(answer.pixels)
                        decoded.grow(answer.pixels)
                    except (RefusedError, OverloadedError):
                        connection.send(Answer.DENIED)
                        raise
                    deadline.extend(answer.pixels / MEGAPIXEL * SECONDS_PER_MEGAPIXEL)
                    connection.send(Answer.GRANTED)
        except (ProcessHungError, *_LOST):
            job.allowance.return_pixels(taken)  # they will be decoded again
            raise
        assert isinstance(answer, Results | BatchFailed), answer
        return answer

    def _write(
        self,
        process: _Process,
        items: Sequence[Result],
        rooms: Sequence[ReservedSegment | Lease | NoRoom],
    ) -> dict[int, list[bytearray]]:
        """Have the items written to where there is room; the buffers of the others."""
        connection = process.connection
        with self._in_time(process):
            connection.send(Offsets([_offset(room) for room in rooms]))
            sent = {
                index: [bytearray(connection.recv_bytes()) for _ in item.buffer_sizes]
                for index, (item, room) in enumerate(zip(items, rooms, strict=True))
                if room is NoRoom.SEND
            }
            written = connection.recv()
            assert isinstance(written, Written), written
            return sent

    @contextlib.contextmanager
    def _in_time(self, process: _Process) -> Iterator[Deadline]:
        """Raises ProcessHungError if the process does not answer in time."""
        deadline = process.deadline(self._timeout_s)
        try:
            with deadline:
                yield deadline
        except _LOST as error:
            if not deadline.missed:
                raise
            raise ProcessHungError("did not answer in time") from error

    def _rooms(
        self, items: Sequence[Result], stack: ExitStack
    ) -> list[ReservedSegment | Lease | NoRoom]:
        """Find a place for each item. What an error leaves reserved is given up."""
        if not isinstance(self._store, ArenaStore):
            return [NoRoom.SEND] * len(items)
        rooms: dict[int, ReservedSegment | Lease | NoRoom] = {}
        first: dict[str, int] = {}
        # In an order that all threads share, since they wait for each other's items.
        for index in sorted(range(len(items)), key=lambda index: items[index].mm_hash):
            item = items[index]
            if item.mm_hash in first:
                rooms[index] = NoRoom.HELD
                continue
            first[item.mm_hash] = index
            layout = SegmentLayout(len(item.envelope), item.buffer_sizes)
            room = self._store.reserve(item.mm_hash, layout)
            if isinstance(room, ReservedSegment):
                stack.enter_context(room)
            rooms[index] = room or NoRoom.SEND
        return [rooms[index] for index in range(len(items))]

    def _collect(
        self,
        items: Sequence[Result],
        updates: Sequence[Any],
        rooms: Sequence[ReservedSegment | Lease | NoRoom],
        sent: dict[int, list[bytearray]],
    ) -> list[Processed]:
        made: dict[str, Processed] = {}
        for index, (item, room) in enumerate(zip(items, rooms, strict=True)):
            if isinstance(room, NoRoom):
                if room is NoRoom.SEND:
                    tensors = decode(item.envelope, [memoryview(each) for each in sent[index]])
                    own = Processed(item.mm_hash, tensors, updates[index])
                    full = isinstance(self._store, ArenaStore)
                    made[item.mm_hash] = own if full else self._store.put(own)
                continue
            assert isinstance(self._store, ArenaStore)
            if isinstance(room, ReservedSegment):
                lease = room.complete(item.envelope, updates[index])
            else:
                lease = room
                lease.annotate(updates[index])
            made[item.mm_hash] = self._store.view(lease)
        return [made[item.mm_hash] for item in items]


def _offset(room: ReservedSegment | Lease | NoRoom) -> int | NoRoom:
    if isinstance(room, ReservedSegment):
        return room.offset
    return NoRoom.HELD if isinstance(room, Lease) else room


def _error(failed: BatchFailed) -> Exception:
    match failed.fault:
        case Fault.REFUSED:
            return RefusedError(failed.reason)
        case Fault.INVALID:
            return ValueError(failed.reason)
        case Fault.BROKEN:
            return ProcessingFailedError(f"a medium could not be processed: {failed.reason}")

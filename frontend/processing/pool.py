"""Processes that process media, each with a thread here that talks to it."""

import logging
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Final

import cloudpickle

from common.errors import ConfigurationError
from common.hf_processor_runs import HfProcessorRuns
from common.telemetry import PREPROCESS_RESTARTS
from common.transfer.arena import Lease, Reservation
from common.transfer.codec import decode
from common.transfer.segment import SegmentLayout
from frontend.fetch.errors import RefusedError
from frontend.processing.batch import Batch, Processed
from frontend.processing.errors import AbandonedError, ProcessingFailedError, ProcessLostError
from frontend.processing.messages import (
    Failed,
    Fault,
    NoRoom,
    Order,
    Ready,
    Result,
    Results,
    Rooms,
    Written,
)
from frontend.processing.store import ArenaStore, ProcessedStore

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 2
"""So often a batch may see a process die before the batch is taken to be the reason."""

_START_S: Final = 120.0
_STOP_S: Final = 5.0

_LOST: Final = (EOFError, OSError)
"""How a connection says that the process at its other end is gone."""


class _Process:
    """One process, as the thread that talks to it sees it."""

    def __init__(self, order: Order) -> None:
        """Start it; it isn't ready yet."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "frontend.processing.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.connection.send(order)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_until_ready(self) -> None:
        """Raises ProcessLostError if it ends instead, or takes too long."""
        try:
            if self.connection.poll(_START_S):
                answer = self.connection.recv()
                assert isinstance(answer, Ready), answer
                return
        except _LOST as error:
            raise ProcessLostError("a process for media did not start") from error
        raise ProcessLostError(f"a process for media did not start within {_START_S:g} s")

    def end(self) -> None:
        """End it; whoever reads from the connection gets an EOFError. May be called twice."""
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class _Job:
    def __init__(self, batch: Batch, abandoned: Callable[[], bool]) -> None:
        self.batch = batch
        self.abandoned = abandoned
        self.outcome: Future[list[Processed]] = Future()


class ProcessPool:
    """Runs batches in as many processes as it is told.

    Batches are taken in the order in which they come. A process that dies is replaced, and
    its batch is given to another one, once.
    """

    def __init__(
        self, order: Order, count: int, store: ProcessedStore, hf_runs: HfProcessorRuns
    ) -> None:
        """Start the processes. Takes seconds: not on the event loop.

        Args:
            order: what each of them gets.
            count: how many.
            store: keeps what they make; the arena in ``order`` is its own.
            hf_runs: counts their runs of the HF processor.

        Raises:
            ConfigurationError: they don't start.
        """
        self._order = order
        self._store = store
        self._hf_runs = hf_runs
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        processes = [_Process(order) for _ in range(count)]
        self._processes = dict(enumerate(processes))
        try:
            for process in processes:
                process.wait_until_ready()
        except ProcessLostError as error:
            for process in processes:
                process.end()
            raise ConfigurationError(f"{error}: see its messages above") from error
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

    def submit(self, batch: Batch, abandoned: Callable[[], bool]) -> Future[list[Processed]]:
        """Process a batch; the result has one item for each medium, in order.

        Args:
            abandoned: asked, in a thread, before it begins: whether nobody wants it now.

        The future raises:
            MediaError: a limit or a decoder refuses a medium.
            ValueError: vLLM refuses it.
            AbandonedError: nobody wanted it.
            ProcessingFailedError: an error of ours, or processes die of it.
        """
        job = _Job(batch, abandoned)
        self._jobs.put(job)
        return job.outcome

    def close(self) -> None:
        """End all processes. Batches under way fail."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for process in list(self._processes.values()):
            process.end()
        for thread in self._threads:
            thread.join()
        for process in self._processes.values():
            process.end()
            process.connection.close()
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job.outcome.set_exception(ProcessingFailedError("the frontend is shutting down"))

    def _serve(self, index: int) -> None:
        while (job := self._jobs.get()) is not None:
            if job.abandoned():
                job.outcome.set_exception(AbandonedError("nobody waits for it"))
            else:
                try:
                    job.outcome.set_result(self._run(index, job.batch))
                except Exception as error:  # noqa: BLE001 # raised where the future is waited for
                    job.outcome.set_exception(error)
            del job  # or it would hold the items until the next one comes

    def _run(self, index: int, batch: Batch) -> list[Processed]:
        for _ in range(ATTEMPTS):
            try:
                return self._exchange(self._processes[index].connection, batch)
            except _LOST:
                if self._closed:
                    raise ProcessingFailedError("the frontend is shutting down") from None
                self._replace(index)
        raise ProcessingFailedError(
            f"a process died of processing this {batch.modality}, and so did the next"
        )

    def _replace(self, index: int) -> None:
        lost = self._processes[index]
        lost.end()
        lost.connection.close()
        PREPROCESS_RESTARTS.inc()
        logger.warning("process %d, which processes media, died: replacing it", lost.pid)
        self._processes[index] = _Process(self._order)
        try:
            self._processes[index].wait_until_ready()
        except ProcessLostError as error:
            # The next batch finds it dead and tries again.
            raise ProcessingFailedError(str(error)) from error

    def _exchange(self, connection: "Connection[Any, Any]", batch: Batch) -> list[Processed]:
        connection.send(batch)
        answer: Results | Failed = connection.recv()
        if isinstance(answer, Failed):
            raise _error(answer)
        self._hf_runs.add(answer.hf_runs)
        updates = cloudpickle.loads(answer.prompt_updates)
        with ExitStack() as stack:
            rooms = self._rooms(answer.items, stack)
            connection.send(Rooms([_offset(room) for room in rooms]))
            sent = {
                index: [bytearray(connection.recv_bytes()) for _ in item.buffer_sizes]
                for index, (item, room) in enumerate(zip(answer.items, rooms, strict=True))
                if room is NoRoom.SEND
            }
            written = connection.recv()
            assert isinstance(written, Written), written
            return self._collect(answer.items, updates, rooms, sent)

    def _rooms(
        self, items: Sequence[Result], stack: ExitStack
    ) -> list[Reservation | Lease | NoRoom]:
        """Find a place for each item. What an error leaves reserved is given up."""
        if not isinstance(self._store, ArenaStore):
            return [NoRoom.SEND] * len(items)
        rooms: dict[int, Reservation | Lease | NoRoom] = {}
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
            if isinstance(room, Reservation):
                stack.enter_context(room)
            rooms[index] = room or NoRoom.SEND
        return [rooms[index] for index in range(len(items))]

    def _collect(
        self,
        items: Sequence[Result],
        updates: Sequence[Any],
        rooms: Sequence[Reservation | Lease | NoRoom],
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
            if isinstance(room, Reservation):
                lease = room.complete(item.envelope, updates[index])
            else:
                lease = room
                lease.annotate(updates[index])
            made[item.mm_hash] = self._store.view(lease)
        return [made[item.mm_hash] for item in items]


def _offset(room: Reservation | Lease | NoRoom) -> int | NoRoom:
    if isinstance(room, Reservation):
        return room.offset
    return NoRoom.HELD if isinstance(room, Lease) else room


def _error(failed: Failed) -> Exception:
    match failed.fault:
        case Fault.REFUSED:
            return RefusedError(failed.reason)
        case Fault.INVALID:
            return ValueError(failed.reason)
        case Fault.BROKEN:
            return ProcessingFailedError(f"a medium could not be processed: {failed.reason}")

"""Exchange of one batch with one process: count its decoded pixels, place its results."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import cloudpickle

from common.errors import OutOfFilesError, OverloadedError
from common.transfer.arena import Lease, ReservedSegment, SegmentLayout
from common.transfer.codec import decode
from common.vllm_compat.renderer_patches import HfProcessorRuns
from frontend.bounded.child_process import LOST, ChildProcess, ProcessHungError
from frontend.fetch import RequestAllowance
from frontend.media_limits import Budget, RefusedError, seconds_for
from frontend.processing.batch import Batch, Processed
from frontend.processing.child_messages import (
    Answer,
    BatchFailed,
    Fault,
    NoRoom,
    Offsets,
    Result,
    Results,
    Wants,
    Written,
)
from frontend.processing.errors import (
    MediumTooCostlyError,
    MissingPackageError,
    ProcessingFailedError,
)
from frontend.processing.store import ArenaStore, ProcessedStore


class Exchange:
    """Exchanges of batches with any process. Thread-safe."""

    def __init__(
        self, store: ProcessedStore, hf_runs: HfProcessorRuns, decoding: Budget, timeout_s: float
    ) -> None:
        """The processes write to the arena of ``store`` and answer within ``timeout_s``, extended
        for pixels. ``decoding`` is the budget of their pixels.
        """
        self._store = store
        self._hf_runs = hf_runs
        self._decoding = decoding
        self._timeout_s = timeout_s

    def run(
        self, process: ChildProcess, batch: Batch, allowance: RequestAllowance
    ) -> list[Processed]:
        """Process a batch in a process: one item for each medium, in order.

        Raises:
            MediaError: a limit or a decoder refuses a medium.
            OverloadedError: no room for its decoded pixels now.
            ValueError: vLLM refuses it.
            ProcessingFailedError: an internal error.
            ProcessHungError: it missed its deadline and was killed.
            EOFError, OSError: it is gone.
        """
        answer = self._results(process, batch, allowance)
        if isinstance(answer, BatchFailed):
            raise _error(answer)
        self._hf_runs.add(answer.hf_runs)
        updates = cloudpickle.loads(answer.prompt_updates)
        with ExitStack() as stack:
            # May wait for the process of another thread, which has a deadline of its own.
            rooms = self._rooms(answer.items, stack)
            sent = self._write(process, answer.items, rooms)
            return self._collect(answer.items, updates, rooms, sent)

    def _results(
        self, process: ChildProcess, batch: Batch, allowance: RequestAllowance
    ) -> Results | BatchFailed:
        """Return the process's answer, granting pixels while the budgets allow."""
        connection = process.connection
        taken = 0
        reserved = self._decoding.reserve(client=allowance.client)
        try:
            with process.in_time(self._timeout_s) as deadline, reserved as decoded:
                connection.send(batch)
                while isinstance(answer := connection.recv(), Wants):
                    taken += answer.pixels
                    try:
                        allowance.take_pixels(answer.pixels)
                        decoded.grow(answer.pixels)
                    except (RefusedError, OverloadedError):
                        connection.send(Answer.DENIED)
                        raise
                    deadline.extend(seconds_for(answer.pixels))
                    connection.send(Answer.GRANTED)
        except (ProcessHungError, *LOST):
            allowance.return_pixels(taken)  # they will be decoded again
            raise
        assert isinstance(answer, Results | BatchFailed), answer
        return answer

    def _write(
        self,
        process: ChildProcess,
        items: Sequence[Result],
        rooms: Sequence[ReservedSegment | Lease | NoRoom],
    ) -> dict[int, list[bytearray]]:
        """Have the items written to their places; return the buffers of items without one."""
        connection = process.connection
        with process.in_time(self._timeout_s):
            connection.send(Offsets([_offset(room) for room in rooms]))
            sent = {
                index: [bytearray(connection.recv_bytes()) for _ in item.buffer_sizes]
                for index, (item, room) in enumerate(zip(items, rooms, strict=True))
                if room is NoRoom.SEND
            }
            written = connection.recv()
            assert isinstance(written, Written), written
            return sent

    def _rooms(
        self, items: Sequence[Result], stack: ExitStack
    ) -> list[ReservedSegment | Lease | NoRoom]:
        """Find a place for each item. ``stack`` frees uncompleted reservations after an error."""
        if not isinstance(self._store, ArenaStore):
            return [NoRoom.SEND] * len(items)
        rooms: dict[int, ReservedSegment | Lease | NoRoom] = {}
        first: dict[str, int] = {}
        # Sorted, to avoid deadlocks: threads wait for each other's items.
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
            return ProcessingFailedError.about(failed.reason)
        case Fault.MISSING:
            return MissingPackageError(failed.reason)
        case Fault.MEMORY:
            return MediumTooCostlyError(failed.reason)
        case Fault.FILES:
            return OutOfFilesError()

"""One request on the worker: its media, the engine, and its outputs. Every way out releases the
request's resources and tells the frontend of the end."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec
from vllm.outputs import PoolingRequestOutput, RequestOutput

from backend_worker.engine.adapters import Adapters, check_files
from backend_worker.engine.calls import AnyOutput
from backend_worker.engine.outputs import take_outputs
from backend_worker.engine.vllm_engine import Items, RankLoad
from backend_worker.plane.frontend_loads import Entry
from backend_worker.plane.media_receiver import MediaReceiver, ReceivedMedia
from backend_worker.plane.outbox import Outbox
from common.errors import (
    EngineFailedError,
    EngineGoneError,
    MediaMissingError,
    MediaUnavailableError,
    ProtocolError,
    RequestRejectedError,
    TransferError,
    WorkerBusyError,
)
from common.identity import MmHash, RequestId
from common.observability import tracing
from common.observability.log_lines import current_request
from common.observability.telemetry import INTERNAL_ERRORS, stage
from common.observability.tracing import span_of_request
from common.request_plane.operations import Operation
from common.request_plane.protocol import (
    Ack,
    Failed,
    FailureKind,
    Nack,
    Output,
    Outputs,
    Status,
    Submit,
    Supply,
    ToFrontend,
)
from common.request_plane.step_sums import StepSums

logger = logging.getLogger(__name__)

MAX_NACKS = 4
"""Times one request may ask for media before it fails. Each answer can be void
again: a segment goes stale, or the engine evicts what it was just given."""

MAX_SHOWN_ID_LEN = 80
"""Characters of a request's id in log lines and spans; frontends' own have 40 or so."""

SUPPLY_TIMEOUT_S = 30.0  # how long a request waits for media it asked for

_FAILURES: Final[dict[type[Exception], FailureKind]] = {
    RequestRejectedError: FailureKind.INVALID,
    ProtocolError: FailureKind.PROTOCOL,
    WorkerBusyError: FailureKind.BUSY,
    TransferError: FailureKind.MEDIA,
    EngineGoneError: FailureKind.ENGINE_DEAD,
    EngineFailedError: FailureKind.ENGINE,
}
"""Kinds of failure reported to the frontend; the first match counts."""


class ServingEngine(Protocol):
    """The part of :class:`backend_worker.engine.vllm_engine.Engine` that the service needs."""

    @property
    def errored(self) -> bool: ...

    @property
    def hf_processor_runs(self) -> int: ...

    @property
    def adapters(self) -> Adapters: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    def holds(self, mm_hash: MmHash) -> bool: ...

    def load(self) -> dict[int, RankLoad]: ...

    def steps(self) -> list[StepSums]: ...

    async def log_statistics(self) -> None: ...

    def generate(self, submit: Submit, items: Items) -> AsyncGenerator[AnyOutput]: ...

    async def settled(self) -> None: ...

    def refuses(self, operation: Operation) -> str: ...

    async def operate(self, operation: Operation) -> None: ...

    async def rests(self) -> bool: ...


class WorkerRequest:
    """A request of one frontend, run by one task. ``frames_bytes`` are kept until its end."""

    task: asyncio.Task[None]
    frames_bytes: int

    def __init__(
        self,
        submit: Submit,
        engine: ServingEngine,
        media_receiver: MediaReceiver,
        send: Callable[[ToFrontend], Awaitable[None]],
        outbox: Outbox,
        status: Callable[[], Status],
        entry: Entry,
        admit: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            admit: waits until the engine takes requests, or raises the reason.
            send: sends to the frontend, after waiting for room.
            outbox: for outputs that share a message.
            status: returns the worker's current status.
            entry: the request's share of the load.
        """
        self._submit = submit
        self._id = submit.request_id
        self._engine = engine
        self._media_receiver = media_receiver
        self._send = send
        self._outbox = outbox
        self._status = status
        self._entry = entry
        self._admit = admit
        self._received = ReceivedMedia()
        self._acking: asyncio.Task[None] | None = None
        self._unsendable: ProtocolError | None = None
        self._waits = False  # for an output of the engine, without an unsent one
        self._left = ""
        self._computed = False
        self._supplies: asyncio.Queue[tuple[Supply, Sequence[memoryview]]] = asyncio.Queue(1)

    def start(self, media: Sequence[memoryview], ended: Callable[[], object]) -> None:
        """Start with the frames of its message; ``ended`` is called after the last message."""
        self.frames_bytes = frames_bytes(self._submit, media)
        self.task = asyncio.create_task(self._run(media, ended))

    def supply(self, supply: Supply, media: Sequence[memoryview]) -> int:
        """Take media that the request asked for, and drop others; return the bytes to keep."""
        if self._supplies.full():
            return 0
        self._supplies.put_nowait((supply, media))
        self.frames_bytes += (nbytes := frames_bytes(supply, media))
        return nbytes

    def abort(self) -> None:
        """Cancel the task in a later turn: a task that never began would not report its end."""
        asyncio.get_running_loop().call_soon(self.task.cancel)

    def leave(self, reason: str) -> None:
        """Hand the rest of the request to another worker, unless all of it is computed."""
        if not self._computed:
            self._left = reason
            self.abort()

    def _end_garbled(self, error: ProtocolError) -> None:
        """Abort after an output that can't be encoded: the answer has a gap."""
        self._unsendable = error
        self.abort()

    async def _run(self, media: Sequence[memoryview], ended: Callable[[], object]) -> None:
        """Run in a task, and so in a context, of its own."""
        current_request.set(in_log_lines(self._id))
        with span_of_request("answer", self._submit.trace_headers or {}) as span:
            if span is not None:
                span.set({"gen_ai.request.id": self._id[:MAX_SHOWN_ID_LEN]})
            await self._answer_and_end(media, ended)

    async def _answer_and_end(
        self, media: Sequence[memoryview], ended: Callable[[], object]
    ) -> None:
        failure: Failed | None = None
        try:
            await self._answer(media)
        except asyncio.CancelledError:
            failure = self._cancelled()
        except TimeoutError:
            failure = self._failed(FailureKind.LATE, "the request's time was over")
        except tuple(_FAILURES) as error:
            kind = next(kind for types, kind in _FAILURES.items() if isinstance(error, types))
            failure = self._failed(kind, str(error))
        except Exception as error:
            logger.exception("request %s failed", self._id)
            failure = self._mistake(error)
        finally:
            # A second cancellation must not keep the frontend from hearing the end, nor replace its
            # cause: a frontend whose own deadline passed also aborts a request that is late here.
            try:
                await asyncio.shield(self._finish(failure, ended))
            except asyncio.CancelledError:
                _end_span(failure)
                raise

    async def _answer(self, media: Sequence[memoryview]) -> None:
        take_outputs(self._take)
        outputs = self._outputs(media)
        try:
            async with asyncio.timeout(self._submit.timeout_s), contextlib.aclosing(outputs):
                async for output in outputs:
                    self._waits = False
                    if self._acking is None:
                        self._entry.first_output()
                        self._received.verify()
                        self._acking = asyncio.create_task(self._ack())
                        await asyncio.shield(self._acking)
                    if output.finished:
                        await self._say_last(output)
                    else:
                        self._check_sendable()
                        await self._outbox.put(_to_wire(self._id, output), self._end_garbled)
                    self._waits = True
        finally:
            self._waits = False
            take_outputs(None)  # this task's context would be in a cycle with this request

    def _take(self, output: RequestOutput) -> bool:
        """Send an output as vLLM makes it, without waking the task; return whether it was taken.
        Only if it is not the last one, the task waits for it, and the one before has left."""
        return (
            self._waits
            and self._unsendable is None
            and self._outbox.offer(_to_wire(self._id, output), self._end_garbled)
        )

    async def _say_last(self, output: RequestOutput) -> None:
        """Send the last output alone: it leaves before this request counts as ended."""
        self._computed = True
        self._entry.ended()
        # Before the end, so that a client that saw the end sees the counts too.
        await self._send(self._status())
        await self._outbox.left(self._id)
        self._check_sendable()
        await self._send(Outputs([_to_wire(self._id, output)]))

    def _check_sendable(self) -> None:
        """Raise ProtocolError if an output could not be sent: later ones would hide the gap."""
        if self._unsendable is not None:
            raise self._unsendable

    async def _finish(self, failure: Failed | None, ended: Callable[[], object]) -> None:
        self._entry.ended()  # the engine has done with it, however long its frontend takes
        try:
            if self._acking is not None:
                # Nothing may write to the memory before we are through with it.
                await asyncio.wait([self._acking])
            else:
                if self._submit.media:
                    await self._engine.settled()
                await self._ack()
        except Exception as error:
            logger.exception("cleanup of request %s failed", self._id)
            failure = self._mistake(error)
        try:
            if failure is not None:
                _end_span(failure)
                message = sendable(failure.message)
                await self._send(msgspec.structs.replace(failure, message=message))
            await self._send(self._status())
        finally:
            self._acking = None  # a copy of that context
            ended()

    async def _outputs(self, media: Sequence[memoryview]) -> AsyncGenerator[AnyOutput]:
        """Yield the engine's outputs, asking the frontend for media as often as needed.

        Raises:
            MediaUnavailableError: it was asked too often, or did not answer.
            WorkerBusyError: the files of the adapter are gone.
            Exception: errors of :meth:`Engine.generate`, except MediaMissingError.
        """
        if (adapter := self._engine.adapters.named(self._submit.lora_request)) is not None:
            await asyncio.to_thread(check_files, adapter)
        received, shipments = self._received, self._submit.shipments
        for attempt in range(MAX_NACKS):
            try:
                with stage("receive"):
                    await self._media_receiver.receive(shipments, media, received)
                await self._admit()
                # The stage set in here also holds in the code that iterates, which is this
                # request's task.
                with stage("generate"):
                    async for output in self._engine.generate(self._submit, received.items):
                        yield output
                return
            except MediaMissingError as error:
                # Items still in hand are given to the engine again. From the second time on all
                # others are wanted: what a full cache holds now it may have evicted by then.
                parts = self._submit.media
                wanted = [part.mm_hash for part in parts] if attempt else error.missing
                missing = [each for each in dict.fromkeys(wanted) if each not in received.items]
                logger.info("request %s: %s", self._id, error)
                shipments, media = (
                    await self._ask_for(missing, error.reason) if missing else ([], ())
                )
        raise MediaUnavailableError(f"media were still missing after {MAX_NACKS} attempts")

    async def _ask_for(
        self, missing: list[MmHash], reason: str
    ) -> tuple[list[bytes], Sequence[memoryview]]:
        await self._send(Nack(self._id, missing, reason))
        try:
            async with asyncio.timeout(SUPPLY_TIMEOUT_S):
                supply, media = await self._supplies.get()
        except TimeoutError as error:
            raise MediaUnavailableError(
                f"the frontend did not supply {len(missing)} missing media items "
                f"within {SUPPLY_TIMEOUT_S:.0f} s"
            ) from error
        return supply.shipments, media

    async def _ack(self) -> None:
        """Release the memory, which the engine has copied, then acknowledge."""
        await self._received.give_back()
        held = [p.mm_hash for p in self._submit.media if self._engine.holds(p.mm_hash)]
        await self._send(Ack(self._id, list(dict.fromkeys(held))))

    def _cancelled(self) -> Failed:
        if self._unsendable is not None:
            return self._failed(FailureKind.PROTOCOL, str(self._unsendable))
        if self._engine.errored:
            return self._failed(FailureKind.ENGINE_DEAD, "the worker's engine died")
        if self._left:
            return self._failed(FailureKind.BUSY, self._left)
        return self._failed(FailureKind.ABORTED, "aborted")

    def _failed(self, kind: FailureKind, message: str) -> Failed:
        return Failed(self._id, kind, message)

    def _mistake(self, error: Exception) -> Failed:
        """Report an internal error: without one the frontend would wait for ever."""
        INTERNAL_ERRORS.labels("worker_request").inc()
        return self._failed(FailureKind.ENGINE, f"internal error: {error!r}")


def frames_bytes(message: Submit | Supply, media: Sequence[memoryview]) -> int:
    """Return the bytes of a message's frames that a request keeps."""
    embeds = message.prompt_embeds if isinstance(message, Submit) else None
    return sum(map(len, media)) + (0 if embeds is None else embeds.nbytes)


def _end_span(failure: Failed | None) -> None:
    if (span := tracing.current()) is not None:
        span.end(None if failure is None else failure.kind.value)


def sendable(reason: str) -> str:
    """Replace characters that UTF-8 can't encode: errors may quote any input."""
    return reason.encode(errors="replace").decode()


def in_log_lines(request_id: RequestId) -> str:
    """Escape and shorten an id for a log line: frontends choose it, and a line is one line."""
    shown = request_id[:MAX_SHOWN_ID_LEN]
    return shown if shown.isprintable() else ascii(shown)


def _to_wire(request_id: RequestId, output: AnyOutput) -> Output:
    if isinstance(output, PoolingRequestOutput):
        return Output(
            request_id,
            [],
            output.finished,
            num_cached_tokens=output.num_cached_tokens,
            pooled=output.outputs.data,
        )
    return Output(
        request_id,
        output.outputs,
        output.finished,
        output.prompt_logprobs,
        output.metrics if output.finished else None,
        output.num_cached_tokens,
        output.num_cache_creation_tokens,
        output.kv_transfer_params,
    )

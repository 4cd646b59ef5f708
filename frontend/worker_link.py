"""Step 5 of a request: the frontend's end of the request plane, one link a worker.

A link is opened once, carries any number of requests, and is lost for good when the
worker disconnects, goes silent or says goodbye; the fleet then opens a new one.
Memory lent to a worker stays lent until the worker acks it or the link is lost.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import msgspec
import zmq
import zmq.asyncio

from common.card import WorkerCard
from common.errors import ProtocolError, ProtocolVersionError, WorkerLostError
from common.identity import Incarnation, RequestId
from common.protocol import (
    PING_INTERVAL_S,
    PROTOCOL_VERSION,
    SESSION_TIMEOUT_S,
    Abort,
    Ack,
    Failed,
    Goodbye,
    Hello,
    Leave,
    Nack,
    Output,
    Ping,
    Status,
    Submit,
    Supply,
    ToFrontend,
    ToWorker,
    Welcome,
)
from common.telemetry import UNDECODABLE_MESSAGES
from common.transfer.base import Loan, join_frames
from common.transfer.metadata import encode_metadata
from common.wire import Codec, Frame

logger = logging.getLogger(__name__)

Answer = Ack | Nack | Output | Failed


class _Dispatch:
    """One request on its way: the answers not yet read, the memory not yet back."""

    def __init__(self, loans: Iterable[Loan]) -> None:
        self.answers: asyncio.Queue[Answer | WorkerLostError] = asyncio.Queue()
        self.loans = list(loans)

    def release(self) -> None:
        for loan in self.loans:
            loan.release()
        self.loans.clear()


class WorkerLink:
    """A session with one incarnation of a worker."""

    def __init__(
        self,
        card: WorkerCard,
        context: zmq.asyncio.Context,
        frontend_id: Incarnation,
        on_status: Callable[[Status], None],
    ) -> None:
        self.card = card
        self.reply = b""
        self._frontend_id = frontend_id
        self._on_status = on_status
        self._codec: Codec[ToFrontend] = Codec(ToFrontend)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the session's timeout
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dispatches: dict[RequestId, _Dispatch] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._lost: asyncio.Future[WorkerLostError] = asyncio.get_running_loop().create_future()
        self._last_heard = 0.0

    async def open(self, offer: bytes) -> None:
        """Connect and introduce ourselves; afterwards ``reply`` holds the worker's
        answer to the transfer offer.

        Raises:
            WorkerLostError: nobody answered within the session's timeout.
            ProtocolVersionError: the worker speaks another version.
        """
        self._socket.connect(self.card.request_endpoint)
        try:
            async with asyncio.timeout(SESSION_TIMEOUT_S):
                await self._send(Hello(PROTOCOL_VERSION, self._frontend_id, offer))
                answer = await self._receive()
            if isinstance(answer, Goodbye):
                raise ProtocolVersionError(f"worker {self.card.worker_id}: {answer.reason}")
            if not isinstance(answer, Welcome) or answer.incarnation != self.card.incarnation:
                raise WorkerLostError(
                    f"{self.card.request_endpoint} is no longer worker {self.card.worker_id}"
                )
        except (TimeoutError, ProtocolError) as error:
            self._close_socket()
            if isinstance(error, ProtocolVersionError):
                raise
            raise WorkerLostError(
                f"worker {self.card.worker_id} did not answer at {self.card.request_endpoint}"
            ) from error
        except BaseException:
            self._close_socket()
            raise
        self.reply = answer.reply
        self._last_heard = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._read(), name=f"read-{self.card.worker_id}"),
            asyncio.create_task(self._keep_time(), name=f"ping-{self.card.worker_id}"),
            asyncio.create_task(self._watch_connection(), name=f"watch-{self.card.worker_id}"),
        ]

    async def dispatch(self, submit: Submit, loans: Sequence[Loan]) -> AsyncGenerator[Answer]:
        """Send a request and iterate over the worker's answers, the last of which is
        a finished Output or a Failed. Takes over the loans, whatever happens.

        Closing the iterator early aborts the request on the worker.

        Raises:
            WorkerLostError: the worker went away before its last answer.
        """
        request_id = submit.request_id
        dispatch = _Dispatch(loans)
        if self._lost.done():
            dispatch.release()
            raise self._lost.result()
        self._dispatches[request_id] = dispatch
        ended = False
        try:
            shipments, frames = _ship(loans)
            await self._send(msgspec.structs.replace(submit, shipments=shipments), frames)
            while not ended:
                answer = await dispatch.answers.get()
                if isinstance(answer, WorkerLostError):
                    ended = True
                    raise answer
                ended = isinstance(answer, Failed) or (
                    isinstance(answer, Output) and answer.finished
                )
                yield answer
        finally:
            if not ended and not self._lost.done():
                # The loans stay with the dispatch until the worker's Ack.
                await asyncio.shield(self._send(Abort(request_id)))

    async def supply(self, request_id: RequestId, loans: Sequence[Loan]) -> None:
        """Send media that the worker asked for. Takes over the loans."""
        dispatch = self._dispatches.get(request_id)
        if dispatch is None:
            for loan in loans:
                loan.release()
            return
        dispatch.loans.extend(loans)
        shipments, frames = _ship(loans)
        await self._send(Supply(request_id, shipments), frames)

    async def lost(self) -> WorkerLostError:
        """Wait until the link is lost; says why."""
        return await asyncio.shield(self._lost)

    async def close(self, reason: str = "this frontend is shutting down") -> None:
        """Leave. Requests still running here end with WorkerLostError."""
        if not self._lost.done():
            with contextlib.suppress(zmq.ZMQError):
                await self._send(Leave())
            self._lose(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close_socket()

    @property
    def active_requests(self) -> int:
        """Requests whose last answer has not come."""
        return len(self._dispatches)

    async def _read(self) -> None:
        while True:
            try:
                message = await self._receive()
            except ProtocolError as error:
                UNDECODABLE_MESSAGES.labels("frontend").inc()
                logger.warning("message of worker %s ignored: %s", self.card.worker_id, error)
                continue
            match message:
                case Status():
                    self._on_status(message)
                case Goodbye():
                    self._lose(message.reason)
                case Ack() | Nack() | Output() | Failed():
                    self._deliver(message)
                case Welcome():
                    pass  # only an answer to Hello, which open() reads

    def _deliver(self, answer: Answer) -> None:
        dispatch = self._dispatches.get(answer.request_id)
        if dispatch is None:
            return
        if isinstance(answer, Ack):
            dispatch.release()
        if isinstance(answer, Failed) or (isinstance(answer, Output) and answer.finished):
            dispatch.release()
            del self._dispatches[answer.request_id]
        dispatch.answers.put_nowait(answer)

    def _lose(self, reason: str) -> None:
        if self._lost.done():
            return
        error = WorkerLostError(f"worker {self.card.worker_id} was lost: {reason}")
        self._lost.set_result(error)
        for dispatch in self._dispatches.values():
            dispatch.release()
            dispatch.answers.put_nowait(error)
        self._dispatches.clear()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if time.monotonic() - self._last_heard > SESSION_TIMEOUT_S:
                self._lose(f"silent for {SESSION_TIMEOUT_S:.0f} s")
                return
            await self._send(Ping())

    async def _watch_connection(self) -> None:
        await self._monitor.recv_multipart()
        # What it sent before, perhaps the end of its last request, may still be unread.
        while await self._socket.poll(0):  # noqa: ASYNC110  # no event says "empty"
            await asyncio.sleep(0.01)
        self._lose("it closed the connection")

    async def _receive(self) -> ToFrontend:
        frames = await self._socket.recv_multipart(copy=False)
        self._last_heard = time.monotonic()
        return self._codec.decode([frame.buffer for frame in frames])[0]

    async def _send(self, message: ToWorker, media: Sequence[Frame] = ()) -> None:
        await self._socket.send_multipart(self._codec.encode(message, media), copy=False)

    def _close_socket(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _ship(loans: Sequence[Loan]) -> tuple[list[bytes], Sequence[Frame]]:
    metadata, frames = join_frames(loans)
    return [encode_metadata(each) for each in metadata], frames

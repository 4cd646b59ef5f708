"""Step 5 of a request: the frontend's end of the request plane, one link per worker.

A link is opened once and carries any number of requests. It is lost for good when the worker
disconnects, goes silent or says goodbye; the fleet then opens a new one. Memory leased to a worker
stays leased until the worker acks it or the link is lost.

Queues are bounded in both directions: messages and bytes for a slow worker, answers for a slow
client.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from common.aio.cleanup import undo_on_error
from common.aio.ipc import PendingCalls
from common.aio.supervised import Work, once, stop_tasks
from common.errors import (
    DuplicateRequestError,
    ProtocolError,
    ProtocolVersionError,
    SlowClientError,
    UnsendableRequestError,
    WorkerBusyError,
    WorkerDiedError,
    WorkerGarbledError,
    WorkerLeftError,
    WorkerLostError,
    WorkerStalledError,
)
from common.identity import Incarnation, RequestId
from common.observability.telemetry import UNDECODABLE_MESSAGES
from common.request_plane.card import WorkerCard
from common.request_plane.fleet_sockets import connect
from common.request_plane.loop_socket import MAX_FRAME_BYTES, Frame, LoopSocket
from common.request_plane.operations import MAX_MESSAGE_LEN, Operation
from common.request_plane.protocol import (
    MAX_OPERATIONS,
    MAX_POOLED_BYTES,
    MAX_SUBMIT_BYTES,
    PING_INTERVAL_S,
    PROTOCOL_VERSION,
    SESSION_TIMEOUT_S,
    SHUTTING_DOWN,
    SLOWEST_LINE,
    Abort,
    Ack,
    AskFigures,
    Failed,
    Figures,
    Goodbye,
    Hello,
    Leave,
    Nack,
    Offer,
    Operate,
    Operated,
    Output,
    Outputs,
    Ping,
    Status,
    Submit,
    Supply,
    Terms,
    ToFrontend,
    ToWorker,
    Welcome,
)
from common.request_plane.wire import Codec, join, split
from common.transfer.base import MediaHandle
from frontend.workers.dispatch import Answer, Backlog, Dispatch, TakeOutput, is_last, ship
from frontend.workers.partial_decode import Missing, flaw_of, legible

logger = logging.getLogger(__name__)

SEND_QUEUE = 1000
"""Messages queued for a worker."""

RECEIVE_QUEUE = 1000
"""Messages of a worker queued here; further ones wait on its side."""

MAX_MESSAGE_BYTES = 16 << 20
"""Limit of the decoded frame; tensors have frames of their own. 131,072 log probabilities, the most
in an honest output, take 10 MB."""

SEND_BYTES = 256 << 20
"""Bytes of media queued for a worker; beyond, media go to another worker."""

UNREAD_ANSWERS = 4096
"""Unread answers of one request, before its client counts as too slow."""

PILED_ANSWERS = 512
"""Unread answers of one request beyond which a link no longer reads ahead, so that the worker
merges further ones."""

READ_S = 0.003
"""How long a link reads answers before their requests have a turn, or as long as their turn before
took. The answers of all would wait in the socket behind those of requests whose turns are long:
their log probabilities are written as JSON, for instance."""

MAX_READ_S = 0.05  # in any case

SHARE = 0.25
"""Limit of a worker's share of the event loop for messages that answer no request. Its load reports
take a hundredth."""

BURST_S = 0.02
"""Budget for such messages handled in a row, in seconds. One of 16 MB may take longer."""

MAX_PAUSE_S = 1.0  # the longest pause after them: perhaps this process was stopped meanwhile

QUIET_S = 3 * PING_INTERVAL_S  # of a worker that counts as dead if its link is closed otherwise


class Pace:
    """Pacing of messages that answer no request: a worker may send any number of them."""

    def __init__(self) -> None:
        self._debt = 0.0
        self._paid = 0.0

    def pause_s(self, began: float, ended: float) -> float:
        """Return for how long no further message should be read, given when one was handled."""
        earned = SHARE * (began - self._paid)
        debt = max(0.0, self._debt - earned) + ended - began
        self._debt, self._paid = min(debt, SHARE * MAX_PAUSE_S), ended
        return self._debt / SHARE if self._debt > BURST_S else 0.0


class WorkerLink:
    """A session with one incarnation of a worker; ``left`` if the worker ended it to shut down."""

    def __init__(
        self,
        card: WorkerCard,
        context: zmq.asyncio.Context,
        frontend_id: Incarnation,
        on_status: Callable[[Status], None],
        stall_s: float = 120.0,
        on_terms: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Count ``stall_s`` of silence on all requests as a stall; ``on_terms`` gets replies to
        offers.
        """
        self.card = card
        self.reply = b""
        self._frontend_id = frontend_id
        self._on_status = on_status
        self._on_terms = on_terms
        self._codec: Codec[ToFrontend] = Codec(ToFrontend)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: SEND_QUEUE,
            zmq.RCVHWM: RECEIVE_QUEUE,
        }
        self._socket = LoopSocket(context, zmq.DEALER, options, zmq.EVENT_DISCONNECTED)
        self._backlog = Backlog(SEND_BYTES)
        self._figures: PendingCalls[bytes] = PendingCalls()
        self._operations: PendingCalls[Operated] = PendingCalls()
        self._dispatches: dict[RequestId, Dispatch] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.left = False
        self._lost: asyncio.Future[WorkerLostError] = asyncio.get_running_loop().create_future()
        self._last_heard = 0.0
        self._stall_s = stall_s
        self._last_answer = 0.0
        self._piled = False

    async def open(self, offer: bytes) -> None:
        """Connect and greet; ``reply`` then answers the transfer offer. Raises WorkerLostError on a
        time-out, ProtocolVersionError if the worker speaks another version.
        """
        with undo_on_error(self._close_socket):
            self._connect()
            self.reply = (await self._greet(offer)).reply
        self._last_heard = time.monotonic()
        self._tasks = [
            self._start("read", self._read),
            self._start("ping", self._keep_time),
            self._start("watch", self._watch_connection),
        ]

    def _connect(self) -> None:
        endpoint = self.card.request_endpoint
        try:
            connect(self._socket.plain, endpoint)
        except zmq.ZMQError as error:
            raise WorkerLostError(
                f"worker {self.card.worker_id} can't be connected to at {endpoint!r}: {error}"
            ) from error

    async def _greet(self, offer: bytes) -> Welcome:
        try:
            async with asyncio.timeout(SESSION_TIMEOUT_S):
                await self._send(Hello(PROTOCOL_VERSION, self._frontend_id, offer))
                answer = self._codec.decode(await self._receive_frames())[0]
        except ProtocolVersionError:
            raise
        except (TimeoutError, ProtocolError, WorkerBusyError) as error:
            raise WorkerLostError(
                f"worker {self.card.worker_id} did not answer at {self.card.request_endpoint}"
            ) from error
        if isinstance(answer, Goodbye):
            reason = answer.reason[:MAX_MESSAGE_LEN]
            raise ProtocolVersionError(f"worker {self.card.worker_id}: {reason}")
        if not isinstance(answer, Welcome) or answer.incarnation != self.card.incarnation:
            raise WorkerLostError(
                f"{self.card.request_endpoint} is no longer worker {self.card.worker_id}"
            )
        return answer

    def _start(self, what: str, work: Work) -> "asyncio.Task[None]":
        """Start a task whose failure loses the link, so that the fleet opens another."""

        def failed(error: BaseException) -> None:
            self._lose(
                f"this frontend failed: {error!r}", WorkerLeftError
            )  # not the worker's fault

        watched = once(f"link {what}", work, failed)
        return asyncio.create_task(watched, name=f"{what}-{self.card.worker_id}")

    async def offer(self, offer: bytes) -> None:
        """Offer other transports than at opening. Raises WorkerBusyError if the queue is full."""
        if not self._lost.done():
            await self._send(Offer(offer))

    async def figures(self) -> bytes:
        """Return the worker's own metrics, empty if too large. Has no time-out. Raises the errors
        of :meth:`offer`, and WorkerLostError if the link is closed.
        """
        return await self._figures.ask(lambda number: self._send(AskFigures(number)))

    async def operate(self, operation: Operation) -> Operated:
        """Run an operation on the worker's engine. Has no time-out; cancelling the wait does not
        cancel it. Raises the errors of :meth:`offer`, and WorkerLostError if the worker is lost
        meanwhile.
        """
        if len(self._operations) >= MAX_OPERATIONS:
            raise WorkerBusyError(f"{MAX_OPERATIONS} operations wait for its answer already")
        if self._lost.done():
            raise WorkerLostError(str(self._lost.result()))
        return await self._operations.ask(lambda number: self._send(Operate(number, operation)))

    async def dispatch(
        self,
        submit: Submit,
        handles: Sequence[MediaHandle],
        take: TakeOutput | None = None,
        computed: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Answer]:
        """Send a request and iterate over the answers, up to a finished Output or a Failed. Takes
        over the handles in any case. Closing the iterator early aborts the request on the worker.

        Args:
            take: may consume outputs while the iterator waits; its errors are raised here.
            computed: called once the worker has done with the answer, read or not.

        Raises:
            DuplicateRequestError: a request of that id has not ended here.
            UnsendableRequestError: a value of the request has no encoding.
            WorkerLostError: the worker went away before its last answer.
            WorkerBusyError: the send queue is full.
            SlowClientError: too many answers are unread.
        """
        request_id = submit.request_id
        dispatch = Dispatch(handles, take, computed)
        with undo_on_error(dispatch.release):
            self._enlist(request_id, dispatch)
        ended = False

        def take_back() -> None:
            dispatch.release()
            self._dispatches.pop(request_id, None)

        with undo_on_error(take_back):
            shipments, frames = ship(handles)
            try:
                await self._send(msgspec.structs.replace(submit, shipments=shipments), frames)
            except ProtocolError as error:
                raise UnsendableRequestError(
                    f"a value of the request can't be given to a worker: {error.__cause__ or error}"
                ) from error
        try:
            while not ended:
                answer = await dispatch.next()
                if isinstance(answer, Exception):
                    ended = isinstance(answer, WorkerLostError | SlowClientError)
                    raise answer
                ended = is_last(answer)
                yield answer
        finally:
            dispatch.left()
            if not ended and not self._lost.done():
                # The handles stay with the dispatch until the worker's Ack.
                await asyncio.shield(self._abort(request_id))

    def _enlist(self, request_id: RequestId, dispatch: Dispatch) -> None:
        if request_id in self._dispatches:
            raise DuplicateRequestError(
                f"request {request_id} is at worker {self.card.worker_id} already"
            )
        if self._lost.done():
            lost = self._lost.result()
            # It never got this request, so it can't have died of it.
            kind = WorkerLostError if isinstance(lost, WorkerDiedError) else type(lost)
            raise kind(str(lost))
        if not self._dispatches:
            self._last_answer = time.monotonic()
        self._dispatches[request_id] = dispatch

    async def supply(self, request_id: RequestId, handles: Sequence[MediaHandle]) -> None:
        """Send media that the worker asked for; take over the handles. Raises as :meth:`offer`."""
        dispatch = self._dispatches.get(request_id)
        if dispatch is None:
            for handle in handles:
                handle.release()
            return
        dispatch.handles.extend(handles)
        shipments, frames = ship(handles)
        await self._send(Supply(request_id, shipments), frames)

    async def lost(self) -> WorkerLostError:
        return await asyncio.shield(self._lost)

    async def close(self, reason: str = "this frontend is shutting down") -> None:
        """Leave. Requests still running here end with WorkerLostError."""
        if not self._socket.closed:
            # Even on a lost link: a stalled worker may still have our requests.
            with contextlib.suppress(zmq.ZMQError, WorkerBusyError):
                await self._send(Leave())
        quiet = time.monotonic() - self._last_heard > QUIET_S
        self._lose(reason, WorkerDiedError if quiet else WorkerLostError)
        try:
            await stop_tasks(self._tasks)
        finally:  # even if cancelled: the event loop keeps an open socket
            self._close_socket()

    @property
    def active_requests(self) -> int:
        return len(self._dispatches)

    async def _read(self) -> None:
        pace, turn, budget = Pace(), 0.0, READ_S
        while True:
            try:
                frames = await self._receive_frames()
            except ProtocolError as error:
                UNDECODABLE_MESSAGES.labels("frontend").inc()
                self._lose(f"its messages can't be taken: {error}", WorkerGarbledError)
                return
            began = time.monotonic()
            answered = await self._handle(frames)
            now = time.monotonic()
            if answered and now - turn < budget and not self._piled and self._socket.readable:
                continue
            # In any case a turn for others, such as the readers of the answers.
            await asyncio.sleep(0 if answered else pace.pause_s(began, now))
            turn = time.monotonic()
            budget = max(READ_S, min(turn - now, MAX_READ_S))

    async def _handle(self, frames: Sequence[memoryview]) -> bool:
        """Return whether a message answered a request."""
        try:
            message = self._codec.decode(frames)[0]
        except ProtocolError as error:
            UNDECODABLE_MESSAGES.labels("frontend").inc()
            await self._not_understood(frames, error)
            return False
        match message:
            case Status():
                self._take_status(message)
            case Terms():
                self._on_terms(message.reply)
            case Figures(number, page):
                self._figures.answered(number, page)
            case Operated():
                self._operations.answered(message.number, message)
            case Goodbye():
                self.left = message.reason == SHUTTING_DOWN
                self._lose(message.reason[:MAX_MESSAGE_LEN], WorkerLeftError)
            case Outputs(outputs):
                return await self._deliver(outputs)
            case Ack() | Nack() | Failed():
                return await self._deliver([message])
            case Welcome():
                pass  # only an answer to Hello, which open() reads
        return False

    def _take_status(self, status: Status) -> None:
        try:
            status.check(self.card.ranks)
        except ProtocolError as error:
            UNDECODABLE_MESSAGES.labels("frontend").inc()
            self._lose(str(error), WorkerGarbledError)
            return
        excused = min(status.arriving, MAX_MESSAGE_BYTES + MAX_POOLED_BYTES) / SLOWEST_LINE
        self._last_heard += excused
        if status.stands_still or excused:  # the rest waits, it does not hang
            self._last_answer = time.monotonic() + excused
        self._on_status(status)

    async def _not_understood(self, frames: Sequence[memoryview], error: ProtocolError) -> None:
        """End the requests whose answers are missing now: some of them, or all."""
        for answer in legible(self._codec, frames):
            if isinstance(answer, Output):
                await self._deliver([answer])
            else:
                await self._miss(answer, f"a message of it can't be read: {error}")

    async def _miss(self, missing: Missing, reason: str) -> None:
        request_id = missing.request_id
        dispatch = self._dispatches.get(request_id)
        if dispatch is None:
            self._lose(reason, WorkerGarbledError)
            return
        logger.warning("worker %s, request %s: %s", self.card.worker_id, request_id, reason)
        dispatch.give_up(WorkerGarbledError(f"worker {self.card.worker_id}: {reason}"))
        if missing.last:
            dispatch.release()
            del self._dispatches[request_id]
        else:
            await self._abort(request_id)

    async def _deliver(self, answers: Sequence[Answer]) -> bool:
        """Return whether any of the answers is to a request in flight."""
        self._last_answer = time.monotonic()
        delivered = self._piled = False
        for answer in answers:
            dispatch = self._dispatches.get(answer.request_id)
            if dispatch is None:
                continue
            delivered = True
            if isinstance(answer, Output) and (flaw := flaw_of(answer)):
                UNDECODABLE_MESSAGES.labels("frontend").inc()
                await self._miss(Missing(answer.request_id, answer.finished), flaw)
                continue
            last = is_last(answer)
            if last or isinstance(answer, Ack):
                dispatch.release()
            if last:
                del self._dispatches[answer.request_id]
                if dispatch.given_up or isinstance(answer, Output):  # others may be tried again
                    dispatch.computed()
            if dispatch.given_up:
                continue
            if dispatch.unread < UNREAD_ANSWERS:
                dispatch.put(answer)
                self._piled = self._piled or dispatch.unread > PILED_ANSWERS
                continue
            dispatch.give_up(SlowClientError(f"the client left {UNREAD_ANSWERS} answers unread"))
            await self._abort(answer.request_id)
        return delivered

    async def _abort(self, request_id: RequestId) -> None:
        try:
            await self._send(Abort(request_id))
        except (WorkerBusyError, WorkerLostError) as error:
            self._lose(str(error))  # or the request would run on unread

    def _lose(self, reason: str, kind: type[WorkerLostError] = WorkerLostError) -> None:
        if self._lost.done():
            return
        message = f"worker {self.card.worker_id} was lost: {reason}"
        self._lost.set_result(kind(message))
        self._operations.fail(lambda: kind(message))
        for dispatch in self._dispatches.values():
            dispatch.release()
            # It can't have died of a request sent after its last sign of life.
            unread = kind is WorkerDiedError and dispatch.since > self._last_heard
            # One error each: its traceback keeps the request alive.
            dispatch.put((WorkerLostError if unread else kind)(message))
        self._dispatches.clear()

    async def _keep_time(self) -> None:
        ticked = time.monotonic()
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            now = time.monotonic()
            stood_still, ticked = now - ticked - PING_INTERVAL_S, now
            if stood_still > QUIET_S:
                # This process stood still, not the worker: its messages are still unread.
                self._last_heard = min(now, self._last_heard + stood_still)
                self._last_answer = min(now, self._last_answer + stood_still)
            if now - self._last_heard > SESSION_TIMEOUT_S:
                self._lose(f"silent for {SESSION_TIMEOUT_S:.0f} s", WorkerDiedError)
                return
            if self._dispatches and now - self._last_answer > self._stall_s:
                self._lose(
                    f"no answer to any of its requests for {self._stall_s:g} s", WorkerStalledError
                )
                return
            with contextlib.suppress(WorkerBusyError):  # its silence will tell
                await self._send(Ping())

    async def _watch_connection(self) -> None:
        await self._socket.monitor.recv_multipart()
        # Messages sent before closing, perhaps the end of its last request, may still be unread.
        while self._socket.readable:  # noqa: ASYNC110  # no event says "empty"
            await asyncio.sleep(0.01)
        self._last_heard = time.monotonic()  # closing is a sign of life for its requests
        self._lose("it closed the connection", WorkerDiedError)

    async def _receive_frames(self) -> Sequence[memoryview]:
        frames = await self._socket.receive()
        self._last_heard = time.monotonic()
        return await join([frame.buffer for frame in frames], MAX_MESSAGE_BYTES)

    async def _send(self, message: ToWorker, media: Sequence[Frame] = ()) -> None:
        if self._socket.closed:
            # pyzmq would write by a freed pointer, which may be another socket's.
            raise WorkerLostError(f"the link to worker {self.card.worker_id} is closed")
        frames = self._codec.encode(message, media)
        if len(frames[1]) > MAX_SUBMIT_BYTES:
            raise ProtocolError(f"no worker takes {len(frames[1])} bytes beside tensors")
        pieces = split(frames)
        try:
            if media and self._backlog.full:
                raise zmq.Again
            if (nbytes := sum(memoryview(each).nbytes for each in frames)) > MAX_FRAME_BYTES:
                self._socket.send(self._codec.encode(Ping(nbytes)))
            self._socket.send(self._backlog.track(pieces) if media else pieces)
        except zmq.Again as error:
            raise WorkerBusyError(
                f"worker {self.card.worker_id} is slow to read: too much waits to be sent to it"
            ) from error

    def _close_socket(self) -> None:
        self._socket.close(200)  # ms: lets the goodbye leave

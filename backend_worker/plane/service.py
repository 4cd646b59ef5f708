"""The worker's end of the request plane: one ROUTER socket, one session per frontend.

The shared loops wait neither for a frontend nor for the engine: slow work runs in separate tasks. A
bad message ends one request or one session.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from backend_worker.plane.load_report import LoadReports, OwnMetrics
from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.operations import Operations
from backend_worker.plane.outbox import FULL_PAUSE_S, Outbox
from backend_worker.plane.request import ServingEngine, WorkerRequest, frames_bytes, sendable
from backend_worker.plane.session import Absent, Session
from common.aio.supervised import note_failure, stop_tasks, supervise
from common.errors import (
    ConfigurationError,
    EngineGoneError,
    ProtocolError,
)
from common.fleet_key import FleetKey
from common.identity import Incarnation, RequestId, WorkerId
from common.observability.telemetry import INTERNAL_ERRORS, UNDECODABLE_MESSAGES
from common.observability.watchdog import measure_loop_delay
from common.request_plane.fleet_sockets import REFUSALS, Gate, count_refusals
from common.request_plane.loop_socket import MAX_FRAME_BYTES, LoopSocket
from common.request_plane.protocol import (
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
    FailureKind,
    Goodbye,
    Hello,
    Leave,
    Offer,
    Operate,
    Ping,
    Refused,
    Status,
    Submit,
    Supply,
    Terms,
    ToFrontend,
    ToWorker,
    Welcome,
)
from common.request_plane.wire import About, Codec, join, split
from common.transfer.base import Attachment
from common.transfer.handshake import TransferOffer, parse_offer
from common.transfer.pages import usable_memory

logger = logging.getLogger(__name__)

SEND_QUEUE = 1000
"""Messages that may wait for one frontend. Requests wait when it is full, and the engine
merges their outputs meanwhile; other frontends don't notice."""

CLOSE_S = 10.0  # how long the engine may take to let go of the requests of a worker that closes
LINGER_MS = 2000  # how long last outputs and goodbyes have to leave

NO_SESSION: Final = (
    "it has no session for this frontend: the worker was restarted, or has ended the session; "
    "this frontend connects again"
)
"""Answer to a peer without a session."""

SILENT: Final = (
    f"the worker heard nothing from this frontend for {SESSION_TIMEOUT_S:.0f} s, so it ended the "
    "session: this frontend was starved of CPU, stopped, or cut off; the worker and its engine go "
    "on, and this frontend connects again"
)
"""Told to a frontend that went silent. It reads this once it runs again."""

ATTACH_S = SESSION_TIMEOUT_S / 3
"""How long a new session waits for its memory. NIXL may need longer, and the frontend doesn't
wait for ever: the session then begins without, and gets it when it is there."""

YIELD_EVERY = 16  # messages read before the loop yields to other tasks

MAX_SESSIONS = 1024
"""Frontends at once, each process of one counted. Each is told of every change. As many more may be
just coming; a frontend whose hello is dropped says it again."""

MAX_SESSION_ASIDES = 2048
"""Tasks aside for one frontend: refusals that wait for it to read, and offers under way."""

MAX_FRAMES_BYTES = max(4 << 30, usable_memory() // 8)
"""Limit of the inline media and embeddings of all requests together."""

RECEIVE_QUEUE = 100
"""Messages of one frontend that wait here: ZeroMQ does not limit their bytes."""


class WorkerService:
    """Serves the request plane until cancelled."""

    def __init__(
        self,
        engine: ServingEngine,
        media_receiver: MediaReceiver,
        worker_id: WorkerId,
        incarnation: Incarnation,
        endpoint: str,
        key: FleetKey | None = None,
        max_requests: int = 1024,
    ) -> None:
        """Bind an endpoint; port 0 or ``*`` means any free one. Only frontends with the key are
        answered. Raises ConfigurationError: the address can't be bound."""
        self._engine = engine
        self._media_receiver = media_receiver
        self._loops: list[asyncio.Task[None]] = []
        self._asides: set[asyncio.Task[None]] = set()
        self._opening: set[bytes] = set()
        self._ending: dict[Session, asyncio.Task[None]] = {}
        self._closed = False
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._codec: Codec[ToWorker] = Codec(ToWorker)
        self._sessions: dict[bytes, Session] = {}
        self._operations = Operations(engine, self._send, self._tell_all, self._leave_to_others)
        self._reports = LoadReports(engine, self._operations)
        self._metrics = OwnMetrics(self._send)
        self._absent = Absent()
        self._draining = False
        self._max_requests = max_requests
        self._held_bytes = 0
        self._context = zmq.asyncio.Context()
        self._gate = Gate(self._context, key)
        options = {
            zmq.ROUTER_MANDATORY: 1,  # tells a disconnected frontend from a slow one
            zmq.SNDHWM: SEND_QUEUE,
            zmq.RCVHWM: RECEIVE_QUEUE,
            zmq.LINGER: 0,
        }
        self._socket = LoopSocket(self._context, zmq.ROUTER, options, REFUSALS)
        try:
            self._socket.plain.bind(endpoint)
        except zmq.ZMQError as error:
            self._gate.close()
            self._context.destroy()
            raise ConfigurationError(f"can't bind request endpoint {endpoint}: {error}") from error

    @property
    def endpoint(self) -> str:
        return str(self._socket.plain.getsockopt_string(zmq.LAST_ENDPOINT))

    async def run(self) -> None:
        """Serve until cancelled or closed. Raises EngineGoneError: the worker should end."""
        if self._closed:
            return
        async with asyncio.TaskGroup() as group:
            self._loops = [
                group.create_task(supervise(task, work, fatal=(EngineGoneError,)), name=task)
                for task, work in (
                    ("request plane", self._receive),
                    ("request plane clock", self._keep_time),
                    ("request plane reports", lambda: self._reports.tell(self._with_news)),
                    ("engine statistics", self._engine.log_statistics),
                    ("loop delay", measure_loop_delay),
                    ("strangers", lambda: count_refusals(self._socket.monitor, "request plane")),
                )
            ]

    async def close(self) -> None:
        """Stop serving: abort requests, close sessions, free the port. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        # Before the sockets go: pyzmq reads and writes by a pointer that is freed with them, and
        # may by then be another socket's.
        await stop_tasks(self._loops)
        await stop_tasks(self._asides)
        for session in list(self._sessions.values()):
            # A dying worker closes the connection without a message.
            goodbye = "" if self._engine.errored else SHUTTING_DOWN
            await self._end_session(session, goodbye)
        if self._ending:
            _, hanging = await asyncio.wait(self._ending.values(), timeout=CLOSE_S)
            if hanging:
                logger.warning("the engine did not free %d requests in time", self.active_requests)
        await self._media_receiver.close()
        self._gate.close()
        self._socket.close(LINGER_MS)
        self._context.destroy(linger=LINGER_MS)

    async def drain(self) -> None:
        """Take no more requests, and wait until the present ones have ended."""
        self._draining = True
        of = (each.requests.values() for each in self._sessions.values())
        if tasks := [each.task for each in itertools.chain.from_iterable(of)]:
            await asyncio.wait(tasks)

    @property
    def active_requests(self) -> int:
        """Number of requests in flight, those of ended sessions included."""
        return sum(len(each.requests) for each in (*self._sessions.values(), *self._ending))

    async def _receive(self) -> None:
        for count in itertools.count(1):
            try:
                address, *parts = await self._socket.receive()
            except ProtocolError as error:
                logger.warning("dropped a message of a frontend: %s", error)
                continue
            frames: Sequence[memoryview] = ()
            session = self._sessions.get(address.bytes)
            if session is not None:
                session.last_heard = time.monotonic()
            try:
                frames = await join([part.buffer for part in parts], MAX_SUBMIT_BYTES)
                session = self._sessions.get(address.bytes)  # it may have ended meanwhile
                message, media = self._codec.decode(frames)
                await self._handle(address.bytes, session, message, media)
            except ProtocolError as error:
                UNDECODABLE_MESSAGES.labels("worker").inc()
                await self._not_understood(session, self._codec.about(frames), error)
            except Exception:
                # An internal error. Other sessions continue, and this frontend must hear of it.
                INTERNAL_ERRORS.labels("worker_session").inc()
                logger.exception("handling a message failed")
                if session is not None:
                    await self._end_session(session, "the worker made a mistake")
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def _handle(
        self,
        address: bytes,
        session: Session | None,
        message: ToWorker,
        media: Sequence[memoryview],
    ) -> None:
        """Act on a message without waiting: slow work runs in a separate task."""
        if isinstance(message, Hello):
            if address not in self._opening and len(self._opening) < MAX_SESSIONS:
                self._opening.add(address)
                opening = self._aside(self._open_session(address, message))
                opening.add_done_callback(lambda _: self._opening.discard(address))
            return
        if isinstance(message, Refused):
            self._absent.refused(message, self._incarnation)
            return
        if session is None:
            await self._send_now(address, Goodbye(NO_SESSION))
            return
        if len(session.asides) >= MAX_SESSION_ASIDES:
            await self._end_session(session, "it says more than this worker can answer")
            return
        match message:
            case Submit():
                if message.request_id in session.requests:
                    self._fail(session, message.request_id, "a request of this id is running")
                    return
                if message.rank not in (None, *self._reports.loads.ranks):
                    self._fail(session, message.request_id, f"there is no rank {message.rank}")
                    return
                if refusal := self._refusal() or self._too_large(frames_bytes(message, media)):
                    self._aside(self._refuse(session, message.request_id, refusal), session)
                    return
                self._begin(session, message, media)
            case Supply():
                request = session.requests.get(message.request_id)
                if request is None:
                    return
                if refusal := self._too_large(frames_bytes(message, media)):
                    request.leave(refusal)
                else:
                    self._held_bytes += request.supply(message, media)
            case Abort():
                request = session.requests.get(message.request_id)
                if request is not None:
                    request.abort()
            case Leave():
                await self._end_session(session)
            case Offer():
                self._aside(self._renew_offer(session, parse_offer(message.offer)), session)
            case Operate(number, operation):
                self._aside(self._operations.answer(session, number, operation), session)
            case AskFigures(number):
                self._aside(self._metrics.tell(session, number), session)
            case Ping(coming):
                session.last_heard += min(coming, MAX_FRAMES_BYTES) / SLOWEST_LINE

    async def _not_understood(
        self, session: Session | None, about: About, error: ProtocolError
    ) -> None:
        """Report an undecodable message, because its sender may wait for an answer."""
        if session is None:
            logger.warning("ignored a message of an unknown frontend: %s", error)
            return
        logger.warning("message of frontend %s: %s", session.frontend_id, error)
        if about.type == Submit.__struct_config__.tag and about.request_id:
            self._fail(session, RequestId(about.request_id), str(error))
        else:
            await self._end_session(session, f"a message can't be read: {error}")

    def _begin(self, session: Session, submit: Submit, media: Sequence[memoryview]) -> None:
        rank = self._reports.loads.least_busy() if submit.rank is None else submit.rank
        # Media tokens stand in the prompt, so it counts each token twice at most.
        prefill_tokens = min(submit.prefill_tokens, 2 * submit.prompt_tokens)
        request = WorkerRequest(
            msgspec.structs.replace(submit, rank=rank),
            self._engine,
            self._media_receiver,
            partial(self._send, session),
            session.outbox,
            partial(self._reports.status, session),
            session.account.started(rank, prefill_tokens, submit.prompt_tokens, submit.choices),
            self._operations.admit,
        )
        others = (other for other in self._sessions.values() if other is not session)
        self._reports.spread(submit, rank, others)
        session.requests[submit.request_id] = request
        request.start(media, partial(self._ended, session, submit.request_id))
        self._held_bytes += request.frames_bytes

    def _ended(self, session: Session, request_id: RequestId) -> None:
        self._held_bytes -= session.requests.pop(request_id).frames_bytes

    def _refusal(self) -> str:
        """Return why no request is taken now; empty if requests are taken."""
        if self._engine.errored:
            return "its engine died"  # not of this one
        if self._draining:
            return "it is draining"
        if self.active_requests >= self._max_requests:
            return f"it has {self._max_requests} requests already"
        return self._operations.state.refusal

    def _too_large(self, nbytes: int) -> str:
        """Return why these bytes can't be kept beside those of the present requests; empty if they
        can."""
        full = nbytes and self._held_bytes + nbytes > MAX_FRAMES_BYTES
        return f"it holds {self._held_bytes} bytes of media already" if full else ""

    def _leave_to_others(self, reason: str) -> None:
        sessions = self._sessions.values()
        for request in [each for session in sessions for each in session.requests.values()]:
            request.leave(reason)

    async def _refuse(self, session: Session, request_id: RequestId, reason: str) -> None:
        """Refuse an untouched request, so that another worker may have it."""
        await self._send(session, Ack(request_id, []))
        await self._send(session, Failed(request_id, FailureKind.BUSY, reason))

    def _fail(self, session: Session, request_id: RequestId, reason: str) -> None:
        """Fail a request without an Ack: another one of its id may run and hold memory."""
        logger.warning("request %s refused: %s", request_id, reason)
        failed = Failed(request_id, FailureKind.PROTOCOL, sendable(reason))
        self._aside(self._send(session, failed), session)

    def _aside(
        self, work: Coroutine[None, None, None], session: Session | None = None
    ) -> asyncio.Task[None]:
        """Run slow work in a task; count its failures, and charge it to a session."""
        task = asyncio.create_task(work)
        self._asides.add(task)
        if session is not None:
            session.asides.add(task)
            task.add_done_callback(session.asides.discard)
        task.add_done_callback(self._asides.discard)
        task.add_done_callback(partial(note_failure, "request plane aside"))
        return task

    async def _open_session(self, address: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            versions = f"version {hello.version}, this worker version {PROTOCOL_VERSION}"
            await self._send_now(address, Goodbye(f"frontend speaks request plane {versions}"))
            return
        if len(self._sessions) >= MAX_SESSIONS and address not in self._sessions:
            await self._send_now(address, Goodbye(f"it has {MAX_SESSIONS} frontends already"))
            return
        try:
            offer = parse_offer(hello.offer)
        except ProtocolError as error:
            UNDECODABLE_MESSAGES.labels("worker").inc()
            logger.warning("hello of frontend %s refused: %s", hello.frontend_id, error)
            await self._send_now(address, Goodbye(sendable(str(error))))
            return
        late = False
        try:
            async with asyncio.timeout(ATTACH_S):
                reply, attachment = await self._media_receiver.attach(offer)
        except TimeoutError:
            late = True
            reply, attachment = self._media_receiver.terms(offer), Attachment()
        except Exception as error:
            await self._send_now(address, Goodbye(sendable(f"internal error: {error!r}")))
            raise
        if previous := self._sessions.get(address):
            await self._end_session(previous)
        outbox = Outbox(lambda outputs: self._send_now(address, outputs), self._aside)
        now, account = time.monotonic(), self._reports.loads.open()
        session = Session(address, hello.frontend_id, attachment, now, account, outbox)
        self._sessions[address] = session
        logger.info("frontend %s connected", hello.frontend_id)
        terms = reply.model_dump_json().encode()
        welcome = Welcome(PROTOCOL_VERSION, self._worker_id, self._incarnation, terms)
        await self._send(session, welcome)
        await self._tell(session)
        if late:
            await self._renew_offer(session, offer)

    async def _renew_offer(self, session: Session, offer: TransferOffer) -> None:
        """Try a frontend's new offer. Its requests continue meanwhile."""
        async with session.renewing:
            reply, attachment = await self._media_receiver.attach(offer)
            if session.ended:
                attachment.detach()
                return
            former, session.attachment = session.attachment, attachment
            former.detach()
        await self._send(session, Terms(reply.model_dump_json().encode()))

    async def _end_session(self, session: Session, reason: str = "") -> None:
        """End a session; tell the frontend the reason, unless it left by itself. Does not wait."""
        if session.ended:
            return
        if reason:
            await session.outbox.send()  # queued outputs come before the end
        session.ended = True
        session.outbox.close()
        if self._sessions.get(session.address) is session:
            del self._sessions[session.address]
        if reason:
            await self._send_now(session.address, Goodbye(sendable(reason)))
        ending = self._ending[session] = asyncio.create_task(self._wind_up(session))
        ending.add_done_callback(lambda _: self._ending.pop(session, None))
        ending.add_done_callback(partial(note_failure, "request plane session end"))

    async def _wind_up(self, session: Session) -> None:
        """Abort a session's requests, wait for the engine, and release the frontend's memory."""
        requests = list(session.requests.values())
        for request in requests:
            request.abort()
        if requests:
            await asyncio.wait([request.task for request in requests])
        session.attachment.detach()
        logger.info("frontend %s disconnected", session.frontend_id)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if self._engine.errored:
                raise EngineGoneError("the engine died")
            self._absent.look(some=bool(self._sessions))
            silent_since = time.monotonic() - SESSION_TIMEOUT_S
            for session in list(self._sessions.values()):
                if session.last_heard < silent_since:
                    silent = "frontend %s was silent for %.0f s: its session and requests are ended"
                    logger.warning(silent, session.frontend_id, SESSION_TIMEOUT_S)
                    await self._end_session(session, SILENT)
                else:
                    await self._tell(session)

    def _with_news(self) -> list[Callable[[], Awaitable[None]]]:
        return [partial(self._tell, one) for one in self._sessions.values() if one.account.has_news]

    def _tell_all(self) -> None:
        for session in () if self._closed else self._sessions.values():
            self._aside(self._tell(session))

    async def _tell(self, session: Session) -> None:
        await self._send(session, self._reports.status(session))

    async def _send(self, session: Session, message: ToFrontend) -> None:
        """Send after queued outputs, once there is room. A Status without room is dropped and
        restored for the next report."""
        while not session.ended and not (
            await session.outbox.send() and await self._send_now(session.address, message)
        ):
            if isinstance(message, Status):
                session.untold(message)
                return
            await asyncio.sleep(FULL_PAUSE_S)

    async def _send_now(self, address: bytes, message: ToFrontend) -> bool:
        """Send if there is room; return whether there was. Never waits."""
        frames = self._codec.encode(message)
        nbytes = sum(memoryview(each).nbytes for each in frames)
        session = self._sessions.get(address)
        if nbytes > MAX_FRAME_BYTES and session is not None and not isinstance(message, Status):
            status = msgspec.structs.replace(self._reports.status(session), arriving=nbytes)
            if not await self._send_now(address, status):
                session.untold(status)
                return False
        try:
            self._socket.send([address, *split(frames)], copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The frontend's socket is gone for good: a new one has another address.
            logger.debug("%s undeliverable", type(message).__name__)
            if session := self._sessions.get(address):
                session.last_heard = -math.inf  # so it ends when the clock ticks next
        return True

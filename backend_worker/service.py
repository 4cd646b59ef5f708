"""The worker's end of the request plane: one ROUTER socket, a session per frontend.

Every request is one task that obtains its media, runs it in the engine and streams
the outputs back. What a task holds it gives back on every way out.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import zmq
import zmq.asyncio
from vllm.outputs import RequestOutput

from backend_worker.engine import EngineLoad, Items
from backend_worker.obtain import MediaInlet, Obtained
from common.errors import (
    ConfigurationError,
    EngineFailedError,
    EngineGoneError,
    MediaMissingError,
    MediaUnavailableError,
    ProtocolError,
    RequestRejectedError,
    TransferError,
    WorkerBusyError,
)
from common.fleet_key import FleetKey
from common.fleet_sockets import REFUSALS, Gate, count_refusals
from common.identity import Incarnation, MmHash, RequestId, WorkerId
from common.protocol import (
    PING_INTERVAL_S,
    PROTOCOL_VERSION,
    SESSION_TIMEOUT_S,
    Abort,
    Ack,
    Failed,
    FailureKind,
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
from common.telemetry import INTERNAL_ERRORS, UNDECODABLE_MESSAGES, stage
from common.transfer.handshake import TransferOffer, parse_offer
from common.wire import Codec, Frame

logger = logging.getLogger(__name__)

MAX_NACKS = 4
"""Times one request may ask for media before it fails. Each answer can be void
again: a segment goes stale, or the engine evicts what it was just given."""

SEND_QUEUE = 1000
"""Messages that may wait for one frontend. Requests wait when it is full, and the engine
merges their outputs meanwhile; other frontends don't notice."""

FULL_PAUSE_S = 0.01
"""How often a full queue is looked at again: a socket can't tell that one of its peers
has room."""

SUPPLY_TIMEOUT_S = 30.0
"""How long a request waits for media it asked for."""


MAX_FRAME_BYTES = 4 << 30
"""A frame holds at most one tensor of one media item. A sender of more is cut off."""


class ServingEngine(Protocol):
    """What the service needs of an engine; :class:`backend_worker.engine.Engine`."""

    @property
    def errored(self) -> bool: ...

    @property
    def hf_processor_runs(self) -> int: ...

    def holds(self, mm_hash: MmHash) -> bool: ...

    def load(self) -> EngineLoad: ...

    def generate(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]: ...

    async def settled(self) -> None: ...


@dataclass
class _Request:
    task: asyncio.Task[None]
    supplies: asyncio.Queue[tuple[Supply, Sequence[memoryview]]] = field(
        default_factory=lambda: asyncio.Queue(maxsize=1)
    )


@dataclass
class _Session:
    """One frontend. ``address`` is the ROUTER's name for its socket."""

    address: bytes
    frontend_id: Incarnation
    offer: TransferOffer
    last_heard: float
    requests: dict[RequestId, _Request] = field(default_factory=dict)


class WorkerService:
    """Serves the request plane until cancelled."""

    def __init__(
        self,
        engine: ServingEngine,
        inlet: MediaInlet,
        worker_id: WorkerId,
        incarnation: Incarnation,
        endpoint: str,
        key: FleetKey | None = None,
        max_requests: int = 1024,
    ) -> None:
        """
        Args:
            endpoint: ZMQ address to bind, port 0 or ``*`` for any free one.
            key: only frontends that have it are answered.
            max_requests: requests of all frontends taken at once.

        Raises:
            ConfigurationError: the address can't be bound.
        """
        self._engine = engine
        self._inlet = inlet
        self._asides: set[asyncio.Task[None]] = set()
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._codec: Codec[ToWorker] = Codec(ToWorker)
        self._sessions: dict[bytes, _Session] = {}
        self._draining = False
        self._max_requests = max_requests
        self._context = zmq.asyncio.Context()
        self._gate = Gate(self._context, key)
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(REFUSALS)
        # A frontend that went away must not look like one that is slow.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._gate.close()
            self._context.destroy()
            raise ConfigurationError(f"can't bind request endpoint {endpoint}: {error}") from error

    @property
    def endpoint(self) -> str:
        """The bound address, with the real port."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    async def run(self) -> None:
        """Serve until cancelled, or until the engine dies.

        Raises:
            EngineGoneError: the engine died; the worker should end.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(), name="request-plane")
            group.create_task(self._keep_time(), name="request-plane-clock")
            group.create_task(count_refusals(self._monitor, "request plane"), name="strangers")

    async def close(self) -> None:
        """Abort what runs, close every session, free the port."""
        for session in list(self._sessions.values()):
            await self._send_now(session.address, Goodbye("the worker is shutting down"))
            await self._end_session(session)
        for task in self._asides:
            task.cancel()
        await asyncio.gather(*self._asides, return_exceptions=True)
        await self._inlet.close()
        self._gate.close()
        self._context.destroy(linger=2000)  # ms: lets last outputs and goodbyes leave

    async def drain(self) -> None:
        """Take no more requests, and wait until those that are here have ended."""
        self._draining = True
        tasks = [
            request.task
            for session in self._sessions.values()
            for request in session.requests.values()
        ]
        if tasks:
            await asyncio.wait(tasks)

    @property
    def active_requests(self) -> int:
        """Requests of all sessions that have not ended."""
        return sum(len(session.requests) for session in self._sessions.values())

    async def _receive(self) -> None:
        while True:
            address, *frames = await self._socket.recv_multipart(copy=False)
            try:
                message, media = self._codec.decode([frame.buffer for frame in frames])
                await self._handle(address.bytes, message, media)
            except ProtocolError as error:
                UNDECODABLE_MESSAGES.labels("worker").inc()
                logger.warning("message ignored: %s", error)

    async def _handle(self, address: bytes, message: ToWorker, media: Sequence[memoryview]) -> None:
        if isinstance(message, Hello):
            # Not awaited here: proving a transport takes time, and others go on.
            self._aside(self._open_session(address, message))
            return
        session = self._sessions.get(address)
        if session is None:
            await self._send(address, Goodbye("no session: say hello first"))
            return
        session.last_heard = time.monotonic()
        match message:
            case Submit():
                if message.request_id in session.requests:
                    raise ProtocolError(f"request {message.request_id} is already running")
                if refusal := self._refusal():
                    # Not awaited here either: the frontend's queue may be full.
                    self._aside(self._refuse(address, message.request_id, refusal))
                    return
                task = asyncio.create_task(self._serve(session, message, media))
                session.requests[message.request_id] = _Request(task)
            case Supply():
                request = session.requests.get(message.request_id)
                if request is not None and not request.supplies.full():
                    request.supplies.put_nowait((message, media))
            case Abort():
                request = session.requests.get(message.request_id)
                if request is not None:
                    request.task.cancel()
            case Leave():
                await self._end_session(session)
            case Ping():
                pass

    def _refusal(self) -> str:
        """Why no request is taken now; empty if one is."""
        if self._draining:
            return "it is draining"
        if self.active_requests >= self._max_requests:
            return f"it has {self._max_requests} requests already"
        return ""

    async def _refuse(self, address: bytes, request_id: RequestId, reason: str) -> None:
        """Nothing of the request was touched, so another worker may have it."""
        await self._send(address, Ack(request_id, []))
        await self._send(address, Failed(request_id, FailureKind.BUSY, reason))

    def _aside(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    async def _open_session(self, address: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            await self._send(
                address,
                Goodbye(
                    f"frontend speaks request plane version {hello.version}, "
                    f"this worker version {PROTOCOL_VERSION}"
                ),
            )
            return
        try:
            offer = parse_offer(hello.offer)
        except ProtocolError as error:
            UNDECODABLE_MESSAGES.labels("worker").inc()
            logger.warning("hello of frontend %s refused: %s", hello.frontend_id, error)
            await self._send(address, Goodbye(str(error)))
            return
        if previous := self._sessions.get(address):
            await self._end_session(previous)
        reply = await self._inlet.attach(offer)
        self._sessions[address] = _Session(address, hello.frontend_id, offer, time.monotonic())
        logger.info("frontend %s connected", hello.frontend_id)
        await self._send(
            address,
            Welcome(
                PROTOCOL_VERSION,
                self._worker_id,
                self._incarnation,
                reply.model_dump_json().encode(),
            ),
        )
        await self._send(address, self._status())

    async def _end_session(self, session: _Session) -> None:
        self._sessions.pop(session.address, None)
        tasks = [request.task for request in session.requests.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._inlet.detach(session.offer)
        logger.info("frontend %s disconnected", session.frontend_id)

    async def _serve(self, session: _Session, submit: Submit, media: Sequence[memoryview]) -> None:
        request_id = submit.request_id
        obtained = Obtained()
        failure: Failed | None = None
        acking: asyncio.Task[None] | None = None
        try:
            outputs = self._outputs(session, submit, media, obtained)
            async with asyncio.timeout(submit.timeout_s), contextlib.aclosing(outputs):
                async for output in outputs:
                    if acking is None:
                        obtained.verify()
                        acking = asyncio.create_task(self._ack(session, submit, obtained))
                        await asyncio.shield(acking)
                    if output.finished:
                        # Before the end, so that whoever saw the end saw the counts too.
                        await self._send(session.address, self._status())
                    await self._send(session.address, _to_wire(request_id, output))
        except asyncio.CancelledError:
            failure = Failed(request_id, FailureKind.ABORTED, "aborted")
        except TimeoutError:
            failure = Failed(request_id, FailureKind.LATE, "the request's time was over")
        except (RequestRejectedError, ProtocolError) as error:
            failure = Failed(request_id, FailureKind.INVALID, str(error))
        except WorkerBusyError as error:
            failure = Failed(request_id, FailureKind.BUSY, str(error))
        except TransferError as error:
            failure = Failed(request_id, FailureKind.MEDIA, str(error))
        except EngineGoneError as error:
            failure = Failed(request_id, FailureKind.ENGINE_DEAD, str(error))
        except EngineFailedError as error:
            failure = Failed(request_id, FailureKind.ENGINE, str(error))
        except Exception as error:
            # Our own mistake. The frontend must hear of it, or it would wait for ever.
            INTERNAL_ERRORS.labels("worker_request").inc()
            logger.exception("request %s failed", request_id)
            failure = Failed(request_id, FailureKind.ENGINE, f"internal error: {error!r}")
        finally:
            # A second cancellation must not keep the frontend from hearing the end.
            await asyncio.shield(self._finish(session, submit, obtained, acking, failure))

    async def _finish(
        self,
        session: _Session,
        submit: Submit,
        obtained: Obtained,
        acking: asyncio.Task[None] | None,
        failure: Failed | None,
    ) -> None:
        if acking is not None:
            # Nobody may write to the memory before we are through with it.
            await asyncio.wait([acking])
        else:
            if submit.media:
                await self._engine.settled()
            await self._ack(session, submit, obtained)
        if failure is not None:
            await self._send(session.address, failure)
        await self._send(session.address, self._status())
        session.requests.pop(submit.request_id, None)

    async def _outputs(
        self, session: _Session, submit: Submit, media: Sequence[memoryview], obtained: Obtained
    ) -> AsyncGenerator[RequestOutput]:
        """The engine's outputs, asking the frontend for media as often as needed.

        Raises:
            MediaUnavailableError: it was asked too often, or did not answer.
            And what :meth:`Engine.generate` raises, except MediaMissingError.
        """
        shipments = submit.shipments
        for _ in range(MAX_NACKS):
            try:
                with stage("obtain"):
                    await self._inlet.obtain(shipments, media, obtained)
                async for output in self._engine.generate(submit, obtained.items):
                    yield output
                return
            except MediaMissingError as error:
                # What is still in hand is simply given to the engine again.
                missing = [mm_hash for mm_hash in error.missing if mm_hash not in obtained.items]
                logger.info("request %s: %s", submit.request_id, error)
                shipments, media = (
                    await self._ask_for(session, submit.request_id, missing, error.reason)
                    if missing
                    else ([], ())
                )
        raise MediaUnavailableError(f"media were still missing after {MAX_NACKS} attempts")

    async def _ask_for(
        self, session: _Session, request_id: RequestId, missing: list[MmHash], reason: str
    ) -> tuple[list[bytes], Sequence[memoryview]]:
        await self._send(session.address, Nack(request_id, missing, reason))
        try:
            async with asyncio.timeout(SUPPLY_TIMEOUT_S):
                supply, media = await session.requests[request_id].supplies.get()
        except TimeoutError as error:
            raise MediaUnavailableError(
                f"the frontend did not supply {len(missing)} missing media items "
                f"within {SUPPLY_TIMEOUT_S:.0f} s"
            ) from error
        return supply.shipments, media

    async def _ack(self, session: _Session, submit: Submit, obtained: Obtained) -> None:
        """The engine has its own copy: give the memory back, then say so."""
        await obtained.give_back()
        held = [p.mm_hash for p in submit.media if self._engine.holds(p.mm_hash)]
        await self._send(session.address, Ack(submit.request_id, list(dict.fromkeys(held))))

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if self._engine.errored:
                raise EngineGoneError("the engine died")
            silent_since = time.monotonic() - SESSION_TIMEOUT_S
            for session in list(self._sessions.values()):
                if session.last_heard < silent_since:
                    logger.warning("frontend %s went silent", session.frontend_id)
                    await self._end_session(session)
                else:
                    await self._send(session.address, self._status())

    def _status(self) -> Status:
        load = self._engine.load()
        return Status(
            load.running,
            load.waiting,
            load.queued_tokens,
            load.kv_usage,
            self._engine.hf_processor_runs,
        )

    async def _send(self, address: bytes, message: ToFrontend) -> None:
        """Send, after waiting for room for as long as the session lasts."""
        while not await self._send_now(address, message):
            if isinstance(message, Status) or address not in self._sessions:
                return  # another one follows, or nobody is waiting
            await asyncio.sleep(FULL_PAUSE_S)

    async def _send_now(self, address: bytes, message: ToFrontend) -> bool:
        """Send if there is room; says whether there was."""
        frames: list[Frame] = self._codec.encode(message)
        try:
            await self._socket.send_multipart([address, *frames], flags=zmq.NOBLOCK)
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


def _to_wire(request_id: RequestId, output: RequestOutput) -> Output:
    return Output(
        request_id,
        output.outputs,
        output.finished,
        output.prompt_logprobs,
        output.metrics,
        output.num_cached_tokens,
        output.num_cache_creation_tokens,
        output.kv_transfer_params,
    )

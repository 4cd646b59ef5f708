"""Serialize operators' operations, and admit or hold requests meanwhile.
``backend_worker/engine/operations.py`` has vLLM's part and the order of operations."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from backend_worker.engine.operations import EngineState
from backend_worker.plane.request import ServingEngine, sendable
from backend_worker.plane.session import Session
from common.errors import EngineGoneError, OperationRefusedError, WorkerBusyError
from common.request_plane.operations import (
    LETS_REQUESTS_IN,
    MAX_MESSAGE_LEN,
    Condition,
    Operation,
    Outcome,
    Pause,
    Resume,
    Sleep,
    WakeUp,
    empties_blocks,
    empties_media,
    name_of,
)
from common.request_plane.protocol import MAX_OPERATIONS, Operated

logger = logging.getLogger(__name__)

WAIT_S: Final = 10.0  # how long a request waits for an operation before another worker gets it

Send = Callable[[Session, Operated], Awaitable[None]]


class Operations:
    """Run operations one at a time and gate requests."""

    def __init__(
        self,
        engine: ServingEngine,
        send: Send,
        changed: Callable[[], None],
        leave: Callable[[str], None],
    ) -> None:
        """
        Args:
            send: sends to a frontend, after waiting for room.
            changed: called when frontends should be told, before any request continues.
            leave: hands the requests of this worker to other workers, with a reason.
        """
        self._engine = engine
        self._send = send
        self._changed = changed
        self._leave = leave
        self._running: Operation | None = None
        self._ended = asyncio.Event()  # the running one
        self._hurrying = False
        self._open = asyncio.Event()
        self._open.set()
        self.state = EngineState()
        self.blocks_emptied = 0.0
        self.media_emptied = 0

    @property
    def stands_still(self) -> bool:
        """Whether requests here get no output until an operator resumes them. Requests that are
        waited for still run; an engine that hangs then has stalled."""
        if self.state.condition is Condition.SERVING:
            return False
        match self._running:
            case Sleep() | Pause() as resting:
                return resting.mode == "keep"
            case Resume() | WakeUp() as going_on:
                return self.state.after(going_on, rests=False).condition is not Condition.SERVING
        return True

    async def admit(self) -> None:
        """Let a request into the engine, after a running operation. Never suspends without one.
        Nothing may fill a cache while an operation empties it: the two ends of vLLM's media cache
        would diverge. Raises WorkerBusyError: the engine rests, or an operation takes long."""
        if not self._open.is_set():
            await self._wait()
        if refusal := self.state.refusal:
            raise WorkerBusyError(refusal)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError as error:
            if (running := self._running) is not None:  # or it ended just now
                raise WorkerBusyError(f"it is busy with {name_of(running)}") from error

    async def answer(self, session: Session, number: int, operation: Operation) -> None:
        """Run a frontend's operation and send the outcome."""
        if session.operating >= MAX_OPERATIONS:
            return  # no frontend of ours asks for so many at once
        session.operating += 1
        try:
            outcome, message = await self.perform(operation)
            await asyncio.sleep(0)  # frontends get the new status first
            await self._send(session, Operated(number, outcome, sendable(message)))
        finally:
            session.operating -= 1

    async def perform(self, operation: Operation) -> tuple[Outcome, str]:
        """Run one operation without a time limit; return the outcome, and why it was not done."""
        name = name_of(operation)
        if refusal := self._engine.refuses(operation):
            return Outcome.REFUSED, refusal
        while self._hurries(operation):
            await self._hurry()
        if (running := self._running) is not None:
            return Outcome.REFUSED, f"it is busy with {name_of(running)}: one operation at a time"
        if refusal := self.state.refuses(operation):
            return Outcome.REFUSED, refusal
        if self.state.needs_nothing(operation):
            return Outcome.DONE, ""
        if isinstance(operation, WakeUp) and operation.tags is not None:
            operation = WakeUp(self.state.asleep_of(operation.tags))
        logger.info("an admin requested %s", name)
        self._running = operation
        self._ended.clear()
        if not isinstance(operation, LETS_REQUESTS_IN):
            self._open.clear()
        try:
            outcome, message = await self._run(operation)
        finally:
            self._running = None
            self._ended.set()
            self._changed()
            self._open.set()
        if message:
            logger.warning("%s failed: %s", name, message)
        return outcome, message[:MAX_MESSAGE_LEN]

    def _hurries(self, operation: Operation) -> bool:
        """Return whether an operation aborts the requests that the running one waits for. Not if it
        would be refused after that one: then requests would have ended for nothing."""
        running = self._running
        return (
            isinstance(operation, Sleep | Pause)
            and operation.mode == "abort"
            and isinstance(running, Sleep | Pause)
            and running.mode == "wait"
            and not self._hurrying
            and not self.state.after(running, rests=True).refuses(operation)
        )

    async def _hurry(self) -> None:
        """Abort the requests that the running operation waits for. A hung engine ends neither."""
        self._hurrying = True
        try:
            if error := await self._tried(Pause("abort", clear_cache=False)):
                logger.warning("could not abort the requests in flight: %r", error)
            await self._ended.wait()
        finally:
            self._hurrying = False

    async def _run(self, operation: Operation) -> tuple[Outcome, str]:
        before = self.state
        self._enter(before.during(operation))
        error = await self._tried(operation)
        if isinstance(error, OperationRefusedError):
            self.state = before
            return Outcome.REFUSED, str(error)
        # Also after a failure: it may have got any distance.
        if empties_blocks(operation):
            self.blocks_emptied = time.time()
        self.media_emptied += empties_media(operation)
        try:
            rests = await self._engine.rests()
        except (EngineGoneError, RuntimeError) as unknown:  # it died, or its ranks disagree
            return Outcome.FAILED, str(unknown)
        if error is None:
            self.state = self.state.after(operation, rests=rests)
            waited = isinstance(operation, Sleep | Pause) and operation.mode == "wait"
            if waited and (refusal := self.state.refusal):
                # vLLM waits for requests that hold blocks; the others would stay in its queue.
                self._leave(refusal)
            return Outcome.DONE, ""
        if not rests:
            self.state = before
        return Outcome.FAILED, f"{type(error).__name__}: {error}"

    async def _tried(self, operation: Operation) -> BaseException | None:
        """Run an operation and return any error: operators are told of each."""
        trying = asyncio.ensure_future(self._engine.operate(operation))
        try:
            await asyncio.wait({trying})
        finally:
            trying.cancel()
        return trying.exception()

    def _enter(self, state: EngineState) -> None:
        if state != self.state:
            self.state = state
            self._changed()
            self._open.set()  # waiting requests are refused

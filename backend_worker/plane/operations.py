"""What operators have the engine do: one operation at a time, while requests go on or wait.

vLLM's part, and which operation may follow which, is ``backend_worker/engine/operations.py``.
"""

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
    LONGEST_MESSAGE,
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
from common.request_plane.protocol import MOST_OPERATIONS, Operated

logger = logging.getLogger(__name__)

WAIT_S: Final = 10.0  # how long a request waits for an operation; then another worker may have it


Send = Callable[[Session, Operated], Awaitable[None]]


class Operations:
    """Carries out operations, and says what they mean for requests."""

    def __init__(
        self,
        engine: ServingEngine,
        send: Send,
        changed: Callable[[], None],
        leave: Callable[[str], None],
    ) -> None:
        """Args:
        send: tells a frontend, after waiting for room.
        changed: called when frontends should be told, before any request goes on.
        leave: gives requests that are here to other workers, for a reason.
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
        """Whether requests that are here get no output until an operator says so. What is being
        waited for runs on, and what an operator has told to go on should: an engine that hangs
        meanwhile has stalled."""
        if self.state.condition is Condition.SERVING:
            return False
        match self._running:
            case Sleep() | Pause() as resting:
                return resting.mode == "keep"
            case Resume() | WakeUp() as going_on:
                return self.state.after(going_on, rests=False).condition is not Condition.SERVING
        return True

    async def admit(self) -> None:
        """Let a request into the engine. What an operation empties nothing may fill meanwhile: the
        two ends of vLLM's media cache would differ. Where none runs this never suspends.

        Raises WorkerBusyError: the engine rests, or an operation takes long.
        """
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
        """Do what a frontend asks for, and say what became of it."""
        if session.operating >= MOST_OPERATIONS:
            return  # no frontend of ours asks for so many at once
        session.operating += 1
        try:
            outcome, message = await self.perform(operation)
            await asyncio.sleep(0)  # frontends are told first what has changed
            await self._send(session, Operated(number, outcome, sendable(message)))
        finally:
            session.operating -= 1

    async def perform(self, operation: Operation) -> tuple[Outcome, str]:
        """Do one, however long that takes; return what became of it, and why it was not done."""
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
        logger.info("an operator wants %s", name)
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
            logger.warning("%s was not done: %s", name, message)
        return outcome, message[:LONGEST_MESSAGE]

    def _hurries(self, operation: Operation) -> bool:
        """Whether an operation ends the requests that the running one waits for. Not if it would
        be refused after that one: then requests would have ended for nothing."""
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
        """End what the running one waits for. An engine that hangs ends neither."""
        self._hurrying = True
        try:
            if error := await self._tried(Pause("abort", clear_cache=False)):
                logger.warning("requests that are waited for could not be ended: %r", error)
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
        # Also if it failed: nobody knows how far it got.
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
                # vLLM waits for those that hold blocks; others would stay in its queue.
                self._leave(refusal)
            return Outcome.DONE, ""
        if not rests:
            self.state = before
        return Outcome.FAILED, f"{type(error).__name__}: {error}"

    async def _tried(self, operation: Operation) -> BaseException | None:
        """What the engine raises; whatever that is, operators are told."""
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
            self._open.set()  # who waits is refused

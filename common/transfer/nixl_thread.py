"""The thread in a worker that owns its NIXL agent and moves all transfers at once.

Tasks are generators that yield whenever they wait for a transfer; they start in the order in
which they came. While there is none the thread sleeps, and costs nothing.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeAlias, TypeVar

from common.errors import ArenaUnavailableError
from common.transfer.nixl_agent import NixlAgent

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

Steps: TypeAlias = Generator[None, None, _Result]

_SPIN_SECONDS: Final = 2e-3
_LONGEST_PAUSE: Final = 1e-3
_OVERDUE_AFTER: Final = 5.0
_OVERDUE_PAUSE: Final = 0.05


def pause(age: float) -> float:
    """How long to wait before transfers are looked at again.

    Proportional to how long they already take, so that neither a short one waits noticeably
    longer than it must nor a long one takes a core from whoever serves it.

    Args:
        age: seconds since the youngest of them began.
    """
    if age < _SPIN_SECONDS:
        return 0.0
    return min(age / 8, _LONGEST_PAUSE) if age < _OVERDUE_AFTER else _OVERDUE_PAUSE


_never_ended: Final[list[Any]] = []
"""Tasks of closed threads that were waiting for a transfer."""


@dataclass(eq=False)
class _Task(Generic[_Result]):
    steps: Steps[_Result]
    done: Callable[[_Result | None, Exception | None], None]
    started: float = field(default_factory=time.monotonic)


class NixlThread:
    """Runs tasks that use one agent.

    Attributes:
        agent: for use by tasks, and by nobody else.
    """

    def __init__(self, role: str) -> None:
        """Makes the agent, in the thread that will own it.

        Raises:
            ConfigurationError: NIXL can't be used here.
        """
        self.agent: NixlAgent
        self._incoming: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._tasks: list[_Task[Any]] = []
        self._closed = threading.Event()
        made: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(role, made), name=f"nixl-{role}", daemon=True
        )
        self._thread.start()
        error = made.get()
        if error is not None:
            raise error

    def run(self, steps: Steps[_Result]) -> _Result:
        """Run a task and wait for it; for start-up and tests.

        Raises:
            ArenaUnavailableError: the thread was closed.
        """
        outcome: queue.SimpleQueue[tuple[_Result | None, Exception | None]] = queue.SimpleQueue()
        self._submit(_Task(steps, lambda result, error: outcome.put((result, error))))
        result, error = outcome.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value] # None only where the result type has it

    async def run_async(
        self,
        steps: Steps[_Result],
        *,
        discard: Callable[[_Result], None] = lambda _: None,
        finished: Callable[[], None] = lambda: None,
    ) -> _Result:
        """Run a task without blocking the event loop.

        Cancelling it leaves the task running to its end, since a transfer can't be stopped.

        Args:
            discard: called on the event loop with a result that nobody waits for any more.
            finished: called on the event loop once the task ended, cancelled or not.

        Raises:
            ArenaUnavailableError: the thread was closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()

        def deliver(result: _Result | None, error: Exception | None) -> None:
            finished()
            if future.cancelled():
                if error is None:
                    discard(result)  # type: ignore[arg-type] # None only if its type has it
                else:
                    logger.debug("a cancelled NIXL task failed: %s", error)
            elif error is None:
                future.set_result(result)  # type: ignore[arg-type] # likewise
            else:
                future.set_exception(error)

        def done(result: _Result | None, error: Exception | None) -> None:
            try:
                loop.call_soon_threadsafe(deliver, result, error)
            except RuntimeError:
                logger.debug("the event loop ended before a NIXL task did")

        self._submit(_Task(steps, done))
        try:
            return await future
        except asyncio.CancelledError:
            # The result may have come in the same turn of the loop as the cancellation.
            if future.done() and not future.cancelled() and future.exception() is None:
                discard(future.result())
            raise

    def start(self, steps: Steps[None]) -> None:
        """Run a task that nobody waits for; its failure is logged."""

        def done(_: None, error: Exception | None) -> None:
            if error is not None:
                logger.warning("a NIXL task failed: %s", error)

        self._submit(_Task(steps, done))

    def close(self) -> None:
        """End the thread and destroy the agent. Tasks that have not ended fail."""
        self._closed.set()
        self._incoming.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(self, task: _Task[Any]) -> None:
        if self._closed.is_set():
            task.done(None, ArenaUnavailableError("NIXL was shut down"))
        else:
            self._incoming.put(task)

    def _main(self, role: str, made: "queue.SimpleQueue[Exception | None]") -> None:
        try:
            self.agent = NixlAgent(role)
        except Exception as error:  # noqa: BLE001 # raised in the constructor
            made.put(error)
            return
        made.put(None)
        while not self._closed.is_set():
            self._accept()
            for task in list(self._tasks):
                self._step(task)
        del self.agent
        # Bytes may still arrive for these, so their buffers must not be freed.
        _never_ended.extend(self._tasks)
        while not self._incoming.empty():
            late = self._incoming.get()
            if late is not None:
                self._tasks.append(late)
        for task in self._tasks:
            task.done(None, ArenaUnavailableError("NIXL was shut down"))

    def _accept(self) -> None:
        """Take in new tasks, waiting for one as long as is right."""
        timeout: float | None = None
        if self._tasks:
            timeout = pause(time.monotonic() - self._tasks[-1].started)
        try:
            task = (
                self._incoming.get(timeout=timeout) if timeout != 0 else self._incoming.get(False)
            )
            while task is not None:
                self._tasks.append(task)
                task = self._incoming.get(False)
        except queue.Empty:
            return

    def _step(self, task: _Task[Any]) -> None:
        try:
            next(task.steps)
        except StopIteration as end:
            self._tasks.remove(task)
            task.done(end.value, None)
        except Exception as error:  # noqa: BLE001 # raised where the task is waited for
            self._tasks.remove(task)
            task.done(None, error)

"""Parent of a frontend's processes: starts them, owns shared resources, ends with them.

It owns the port, so that connections wait while a process restarts, and the arena, so that a killed
process loses no picture. It serves no requests itself.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from prometheus_client import REGISTRY, generate_latest
from pydantic import Field

from common.aio.processes import StopSignals, python_command
from common.aio.supervised import CALM_S, FIRST_PAUSE_S, MAX_PAUSE_S, supervise
from common.backoff import Backoff
from common.cli.command_line import FRONTEND, ConfigSettings, read_command_line
from common.cli.flag_settings import FlagSettings
from common.cli.process_settings import ProcessSettings
from common.errors import ArenaUnavailableError, ConfigurationError
from common.observability.log_lines import configure_logging
from common.observability.telemetry import (
    ARENA_BYTES,
    ARENA_BYTES_USED,
    CHILD_RESTARTS,
    PROCESSES,
)
from common.transfer.arena import Arena, reap_orphans
from common.transfer.shared_arena import ArenaKeeper
from frontend.processes.child import MEMBER, Child
from frontend.processes.listeners import ConnectionCounts, listen, name_of
from frontend.processes.messages import Answered, Ask, Assigned, FromChild, Plan, Questions, Serving

logger = logging.getLogger(__name__)


class ProcessesSettings(FlagSettings):
    """Number of processes that serve for a frontend."""

    flag_group: ClassVar[str] = "processes"

    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that serve on one port and share one arena; what is limited for the "
        "frontend is divided among them",
    )


LAST_S: Final = 15.0
"""Time for a process to end, beyond the time of its requests."""

_METRICS: Final = (
    "mmrouter_processes",
    "mmrouter_child_restarts_total",
    "mmrouter_arena_bytes",
    "mmrouter_arena_bytes_used",
)


class CannotServeError(Exception):
    """A process ended with ``status`` before it had served, and no other serves."""

    def __init__(self, index: int, status: int) -> None:
        self.status = status
        super().__init__(f"process {index} ended with status {status} before it served")


class Parent:
    def __init__(self, command: Sequence[str], count: int, drain_timeout_s: float) -> None:
        """Keep ``count`` processes; at the end their requests have ``drain_timeout_s``."""
        self._command = command
        self._count = count
        self._drain_timeout_s = drain_timeout_s
        self._children: set[Child] = set()
        self._serving: set[Child] = set()
        self._has_served = False
        self._stopping = asyncio.Event()
        self._planned = asyncio.Event()
        self._listeners: list[socket.socket] = []
        self._uds: str | None = None
        self._counting = ConnectionCounts.make(count)
        self._counts = ConnectionCounts(self._counting, count)
        self._arena: Arena | None = None
        self._keeper: ArenaKeeper | None = None
        self._questions = Questions(
            lambda: {child for child in self._children if child.attached}, _own_answer
        )
        PROCESSES.set_function(lambda: len(self._serving))

    async def run(self) -> int:
        """Serve until all have ended; return the exit status."""
        stopper = asyncio.create_task(self._stop_when_asked(StopSignals()), name="stop")
        keeping = [
            asyncio.create_task(self._keep(index), name=f"process {index}")
            for index in range(self._count)
        ]
        try:
            statuses = await asyncio.gather(*keeping)
            return next(filter(None, statuses), 0)
        except CannotServeError as error:
            logger.error("%s, and none serves: the frontend ends", error)
            return error.status  # the process has logged the reason, unless killed
        except ConfigurationError as error:
            logger.error("%s", error)
            return error.exit_status
        finally:
            for task in (stopper, *keeping):
                task.cancel()
            await self._end_all()
            await asyncio.gather(stopper, *keeping, return_exceptions=True)
            os.close(self._counting)
            if self._arena is not None:
                self._arena.close()

    async def _keep(self, index: int) -> int:
        """Restart one process until all are to end; return its last status."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, calm_s=CALM_S)
        if index:  # the first one plans for all, and reports bad arguments
            await _any_of(self._planned, self._stopping)
        while not self._stopping.is_set():
            started = time.monotonic()
            status, has_served = await self._run(index)
            if self._stopping.is_set():
                return status
            failed = not self._has_served or 0 < status < 128  # by itself: it would fail again
            if failed and not has_served and not self._serving:
                # Otherwise clients would wait forever on a port from which no process accepts.
                raise CannotServeError(index, status or 1)
            if status == 0:
                backoff.reset()
            pause = backoff.next_s(time.monotonic() - started)
            CHILD_RESTARTS.labels("frontend").inc()
            logger.warning(
                "process %d ended with status %d: starting another in %g s", index, status, pause
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
        return 0

    async def _run(self, index: int) -> tuple[int, bool]:
        """Run one process once; return its exit status, and whether it has served."""
        try:
            child = await Child.start(index, self._count, self._command, self._received)
        except OSError as error:
            logger.error("process %d can't be started: %s", index, error)
            return 1, self._has_served
        self._children.add(child)
        logger.info("process %d has pid %d", index, child.pid)
        watching = asyncio.create_task(supervise("heartbeats of a process", child.kill_if_silent))
        try:
            if self._stopping.is_set():  # it missed the message to the other processes
                child.stop(at_once=False)
            plan = await child.plan()
            if plan is not None and not self._stopping.is_set():
                await self._prepare(plan)
                await self._assign(child)
            return await child.ended(), child in self._serving
        finally:
            watching.cancel()
            self._counts.not_accepting(index)
            self._serving.discard(child)
            self._children.discard(child)
            self._questions.gone(child)

    async def _prepare(self, plan: Plan) -> None:
        """Create the shared resources, once."""
        if self._planned.is_set():
            return
        self._listeners = listen(plan.host, plan.port, plan.uds)
        self._uds = plan.uds  # from now on it is ours to remove
        reap_orphans()
        if plan.arena_bytes:
            try:
                self._arena = await asyncio.to_thread(Arena, plan.arena_bytes)
            except ArenaUnavailableError as error:
                if plan.arena_needed:
                    raise ConfigurationError(str(error)) from error
                logger.warning("shared memory is unavailable (%s); media travel inline", error)
            else:
                arena = self._arena
                self._keeper = ArenaKeeper(arena)
                ARENA_BYTES.set(arena.statistics().bytes_total)
                ARENA_BYTES_USED.set_function(lambda: arena.statistics().bytes_used)
        logger.info("listening on %s", ", ".join(map(name_of, self._listeners)))
        self._planned.set()

    async def _assign(self, child: Child) -> None:
        listeners = [listener.fileno() for listener in self._listeners]
        descriptors = [self._counting, *listeners]
        alone = not any(other.attached for other in self._children)
        if self._keeper is None or self._arena is None:
            await child.assign(Assigned(None, alone), descriptors)
            return
        ours, theirs = socket.socketpair()
        with theirs:
            offer = self._arena.offer.model_dump_json().encode()
            await child.assign(Assigned(offer, alone), [*descriptors, theirs.fileno()])
        await self._keeper.attach(ours)

    def _received(self, child: Child, message: FromChild) -> None:
        match message:
            case Serving():
                self._serving.add(child)
                self._has_served = True
            case Ask():
                self._questions.ask(child, message)
            case Answered():
                self._questions.answered(child, message)

    async def _stop_when_asked(self, signals: StopSignals) -> None:
        await signals.asked()
        self._stopping.set()
        for child in self._children:
            child.stop(at_once=False)
        self._stop_listening()
        await signals.at_once(self._drain_timeout_s + LAST_S)
        for child in self._children:
            child.stop(at_once=True)
        await asyncio.sleep(LAST_S)
        for child in self._children:
            logger.warning("process %s does not end: it is killed", child.name)
            child.kill()

    async def _end_all(self) -> None:
        self._stopping.set()
        self._stop_listening()
        left = list(self._children)
        for child in left:
            child.kill()
        await asyncio.gather(*(child.ended() for child in left))

    def _stop_listening(self) -> None:
        """Shut down the sockets in all processes, so that no client waits for a connection that no
        process will take: a stopped process keeps its descriptors open.
        """
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            with contextlib.suppress(OSError):  # not listening yet
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        if self._uds is not None:
            Path(self._uds).unlink(missing_ok=True)
            self._uds = None


def run_processes(argv: Sequence[str]) -> int | None:
    """Run as the parent and return the exit status; None if this process is to serve, also on wrong
    arguments, which the full parser reports.
    """
    if MEMBER in os.environ:
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    groups = (ConfigSettings, ProcessesSettings, ProcessSettings)
    try:
        found, rest = read_command_line(parser, groups, FRONTEND, argv)
        count = ProcessesSettings.from_args(found).processes
        process = ProcessSettings.from_args(found)
    except (ConfigurationError, argparse.ArgumentError):
        return None
    if count == 1 or {"-h", "--help"} & set(rest):
        return None
    configure_logging(process.log_setup("frontend"))

    command = [*python_command("frontend"), *argv]
    return asyncio.run(Parent(command, count, process.drain_timeout_s).run())


def _own_answer(topic: str) -> bytes | None:
    if topic != "metrics":
        return None
    return generate_latest(REGISTRY.restricted_registry(_METRICS))


async def _any_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()

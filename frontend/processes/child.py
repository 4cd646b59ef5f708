"""A child process of a frontend, from the parent's view."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from common.aio.ipc import FrameProtocol, Frames, frame
from common.aio.processes import end_with_parent
from frontend.processes.messages import Asked, Assigned, Attached, FromChild, Plan, Stop

logger = logging.getLogger(__name__)

MEMBER: Final = "MMROUTER_MEMBER"
"""Environment variable of a child: pid of its parent, its number, the number of children, and the
descriptor of their connection."""

START_S: Final = 300.0
"""Time-out until a process listens to its parent: a cold disk loads vLLM's imports in minutes."""

HEARTBEAT_S: Final = 5.0

MISSED: Final = 6
"""Consecutive heartbeats without an answer after which a process counts as hung."""

MISSED_STOPPED: Final = 2
"""The same of a process that the kernel says is stopped (SIGSTOP), so not merely slow."""


class Child:
    """A started process, named by its number from 0."""

    def __init__(
        self,
        index: int,
        process: asyncio.subprocess.Process,
        end: socket.socket,
        on_message: "Callable[[Child, FromChild], None]",
    ) -> None:
        self.name = str(index)
        self._process = process
        self._end = end
        self._on_message = on_message
        self._protocol: FrameProtocol[FromChild] | None = None
        self._attached = asyncio.Event()
        self._heard = 0
        self._told_to_stop = False

    @classmethod
    async def start(
        cls,
        index: int,
        count: int,
        command: Sequence[str],
        on_message: "Callable[[Child, FromChild], None]",
    ) -> "Child":
        """Start a process; ``on_message`` gets all messages but the plan. Raises OSError."""
        # vLLM would report the metrics of all processes as each one's.
        environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as opened, theirs:
            opened.enter_context(ours)
            ours.setblocking(False)
            member = f"{os.getpid()} {index} {count} {theirs.fileno()}"
            process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                env=environment | {MEMBER: member},
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )
            opened.pop_all()
        return cls(index, process, ours, on_message)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def attached(self) -> bool:
        return self._attached.is_set()

    async def plan(self) -> Plan | None:
        """Return its plan; None if it ends or closes its connection instead."""
        frames: Frames[FromChild] = Frames(FromChild)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            while data := await loop.sock_recv(self._end, 1 << 16):
                for message in frames.feed(data):
                    return message if isinstance(message, Plan) else None
        return None

    async def assign(self, assigned: Assigned, descriptors: Sequence[int]) -> None:
        with contextlib.suppress(OSError):  # it has ended
            socket.send_fds(self._end, [frame(assigned)], descriptors)
        self._protocol = FrameProtocol(FromChild, self._received, lambda: None)
        protocol = self._protocol
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, self._end)

    def send(self, message: msgspec.Struct) -> None:
        if self._protocol is not None:
            self._protocol.send(message)

    def stop(self, *, at_once: bool) -> None:
        """Tell it to end, by a message: it may have had the frontend's signal, and a second one
        means at once.
        """
        self._told_to_stop = True
        if self.attached:
            self.send(Stop(at_once))
        else:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._told_to_stop = True
        self._signal(signal.SIGKILL)

    async def kill_if_silent(self) -> None:
        """Send heartbeats until cancelled, and kill a process that misses several: its siblings
        wait for its answers, and clients for requests that it accepted.
        """
        try:
            async with asyncio.timeout(START_S):
                await self._attached.wait()
        except TimeoutError:
            logger.error("process %s did not start in %g s: it is killed", self.name, START_S)
            self.kill()
            return
        missed = 0
        # A count, not a time: the parent may be stopped itself.
        while missed < (MISSED_STOPPED if missed and self._is_stopped() else MISSED):
            heard = self._heard
            self.send(Asked(0, "", b""))  # heartbeat: no question has that number
            await asyncio.sleep(HEARTBEAT_S)
            missed = missed + 1 if heard == self._heard else 0
        silent_s = missed * HEARTBEAT_S
        logger.error("process %s has been silent for %g s: it is killed", self.name, silent_s)
        self.kill()

    def _is_stopped(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False  # it has ended
        return state == "T"

    async def ended(self) -> int:
        """Wait for its end; return its exit status, 128 plus the number after a signal."""
        status = await self._process.wait()
        if self._protocol is not None:
            self._protocol.close()
        else:
            self._end.close()
        if status == -signal.SIGTERM and self._told_to_stop and not self.attached:
            return 0  # it had not begun
        return status if status >= 0 else 128 - status

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _received(self, message: FromChild) -> None:
        self._heard += 1
        if isinstance(message, Attached):
            self._attached.set()
            if self._told_to_stop:
                self.send(Stop(False))
        self._on_message(self, message)

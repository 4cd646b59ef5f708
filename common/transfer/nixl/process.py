"""Supervisor of a process with a NIXL agent: start, watch, restart.

Over TCP an agent exposes all memory of its process to any peer that reaches its port, and a READ of
a low address kills it. So neither frontend nor worker has an agent: each has such a process.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec
import torch

from common.aio.processes import SpawnedProcess
from common.backoff import Backoff
from common.errors import ArenaUnavailableError, ConfigurationError
from common.observability.telemetry import CHILD_RESTARTS, INTERNAL_ERRORS
from common.transfer.nixl_processes import (
    Channel,
    NixlNetwork,
    NixlPing,
    NixlPong,
    Start,
    Unusable,
    wait,
)

logger = logging.getLogger(__name__)

_Sent = TypeVar("_Sent")
_Got = TypeVar("_Got")

START_S: Final = 60.0  # how long one may take to begin

SILENCE_S: Final = 15.0
"""After so long one is asked whether it is alive, and ended after as long again."""

FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 30.0
"""Between the end of one and the start of the next: twice as long each time, until one lives
for as long as the longest."""

_GIVEN_UP_S: Final = 0.2  # polling interval of a waiter for its own abandonment

_STOP_S: Final = 10.0


class NixlProcess(Generic[_Sent, _Got]):
    """One process at a time, and a thread that supervises it."""

    def __init__(
        self,
        module: str,
        network: NixlNetwork,
        open_memory: Callable[[], int],
        size: int,
        writable: bool,
        incoming: object,
        *,
        on_message: Callable[[_Got], None],
        on_lost: Callable[[], None],
    ) -> None:
        """Start the process; the thread restarts it until :meth:`close`.

        Args:
            module: the process's module.
            network: allowed networks.
            open_memory: returns a descriptor of its memory, which is closed here.
            size: bytes of that memory.
            writable: whether it is mapped for writing.
            incoming: type of its messages.
            on_message: called in the thread; the first message says that the process is ready.
            on_lost: called in the thread when a ready process has ended.

        Raises ConfigurationError: the network is impossible.
        """
        network.transports()
        self._module = module
        self._role = f"nixl_{module.rpartition('.')[2]}"
        self._network = network
        self._open_memory = open_memory
        self._size = size
        self._writable = writable
        self._incoming = incoming
        self._on_message = on_message
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._channel: Channel[_Sent | NixlPing, _Got | NixlPong | Unusable] | None = None
        self._process: SpawnedProcess | None = None
        self._first: Future[None] = Future()
        # Not a pool's: the kernel kills the process when the thread that started it ends.
        self._thread = threading.Thread(target=self._run, name=self._role, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        with self._lock:
            return None if self._process is None else self._process.pid

    def wait_until_ready(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for the first process, not on the event loop. Raises ConfigurationError, and
        closes."""
        try:
            while not self._first.done() and not given_up():
                wait_for([self._first], _GIVEN_UP_S)
            if not self._first.done():
                raise ConfigurationError("NIXL was shut down")
            self._first.result()
        except ConfigurationError:
            self.close()
            raise

    def send(self, message: _Sent) -> None:
        """Send a message, from any thread. Raises ArenaUnavailableError: no process now."""
        with self._lock:
            if self._channel is None:
                raise ArenaUnavailableError("the process for NIXL is not there at the moment")
            try:
                self._channel.send(message)
            except OSError as error:
                self._kill()
                raise ArenaUnavailableError(f"the process for NIXL is gone: {error}") from error

    def restart(self) -> None:
        """Kill the process and its work; another one follows."""
        with self._lock:
            self._kill()

    def close(self) -> None:
        """End the process and the thread. Later calls do nothing."""
        self._closed.set()
        self.restart()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, calm_s=MAX_PAUSE_S)
        while not self._closed.is_set():
            began = time.monotonic()
            reason = "it ended"
            try:
                if self._one():
                    CHILD_RESTARTS.labels(self._role).inc()
            except ConfigurationError as error:
                reason = str(error)
                self._settle(error)
            except OSError as error:
                reason = f"it can't be started: {error}"
                self._settle(ConfigurationError(f"a process for NIXL can't be started: {error}"))
            except Exception as error:
                # An internal error. Without this the thread would end unnoticed.
                INTERNAL_ERRORS.labels("nixl_process").inc()
                logger.exception("the thread that supervises a NIXL process failed")
                reason = repr(error)
                self._settle(ConfigurationError(f"a process for NIXL can't be had: {error!r}"))
            if self._closed.is_set():
                break
            pause = backoff.next_s(time.monotonic() - began)
            logger.warning("restarting the NIXL process in %.1f s: %s", pause, reason)
            self._closed.wait(pause)
        self._settle(ConfigurationError("NIXL was shut down"))

    def _settle(self, error: ConfigurationError | None = None) -> None:
        """Record the outcome of the first start; later ones don't matter."""
        if self._first.done():
            return
        if error is None:
            self._first.set_result(None)
        else:
            self._first.set_exception(error)

    def _one(self) -> bool:
        """Start a process and handle its messages until it ends; return whether it was ready."""
        channel = self._start()
        ready = False
        # A timer, since a process that hangs before it is ready would block this for ever.
        impatience = threading.Timer(START_S, self.restart)
        impatience.daemon = True
        impatience.start()
        try:
            asked = False
            while True:
                if not wait(channel.fileno(), SILENCE_S):
                    if asked and ready:
                        logger.error("the NIXL process does not answer; restarting it")
                        break
                    asked = ready
                    if ready:
                        channel.send(NixlPing())
                    continue
                asked = False
                message = channel.receive()
                if isinstance(message, NixlPong):
                    continue
                if isinstance(message, Unusable):
                    raise ConfigurationError(f"NIXL can't be used here: {message.reason}")
                self._on_message(message)
                if not ready:
                    ready = True
                    impatience.cancel()
                    self._settle()
        except (EOFError, OSError):
            if not ready and not self._closed.is_set():
                raise ConfigurationError("a process for NIXL ended before it was ready") from None
        except msgspec.MsgspecError as error:
            logger.error("malformed message from the NIXL process; restarting it: %s", error)
        finally:
            impatience.cancel()
            self._end()
            if ready:
                self._on_lost()
        return ready

    def _start(self) -> Channel[_Sent | NixlPing, _Got | NixlPong | Unusable]:
        memory = self._open_memory()
        search_path = [str(Path(path or ".").absolute()) for path in sys.path]

        def command(end: int) -> list[str]:
            start = Start(
                channel=end,
                memory=memory,
                size=self._size,
                error_handling=self._network.error_handling,
                needs_files=self._network.needs_files,
                parent=os.getpid(),
                torch_has_cuda=torch.version.cuda is not None,
                writable=self._writable,
            )
            return [sys.executable, "-P", "-s", "-m", self._module, start.argument()]

        try:
            process = SpawnedProcess(
                command,
                socket.SOCK_SEQPACKET,
                descriptors=[memory],
                cwd="/",
                env=self._network.environment(os.environ, search_path),
                only_stderr=True,  # where UCX logs to
            )
        finally:
            os.close(memory)
        channel: Channel[_Sent | NixlPing, _Got | NixlPong | Unusable] = Channel(
            process.socket, self._incoming
        )
        with self._lock:
            self._process, self._channel = process, channel
            if self._closed.is_set():
                self._kill()
        return channel

    def _end(self) -> None:
        with self._lock:
            process, self._process, self._channel = self._process, None, None
        assert process is not None
        status = process.end(_STOP_S)
        if status is not None:  # else it is the kernel's now
            logger.debug("a process for NIXL ended with status %d", status)

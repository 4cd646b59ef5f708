"""Processes that decode media, each one at a time.

FFmpeg aborts on what it takes to be impossible, and a C library's abort ends its process. Here it
ends one request. A process that hangs is killed, and one that grows has a limit. Everyday pictures
are decoded by threads: their way back would take longer, and their libraries are looked at most.
"""

import logging
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from vllm.multimodal.media import ImageMediaIO, MediaIO

from common.aio import fork_server
from common.errors import MmRouterError, OutOfFilesError, OverloadedError
from common.observability.log_lines import current_request, log_setup
from common.observability.telemetry import CHILD_RESTARTS
from common.observability.watchdog import allow
from frontend.bounded.child_process import LOST, ChildProcess, ProcessHungError
from frontend.bounded.fork_supply import Forks, ProcessLostError
from frontend.fetch import decoder_child
from frontend.fetch.content import Content
from frontend.fetch.decoder_child import Decoded, Medium, NotDecoded, StartUp, Wants
from frontend.media_limits import COPIES_WAIT_S, FetchPolicy, UnfetchableError, seconds_for

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 2
"""Processes that a medium may end before it is blamed: the kernel may have killed one."""

_TITLE: Final = "mmrouter frontend: decodes media"

_KILLING_S: Final = 10.0
"""Of a thread that waits for a process, so that the process is given up, and not the thread."""

_ALIGNED: Final = 64

_EVERYDAY: Final = re.compile(rb"\xff\xd8\xff|\x89PNG")
"""Beginnings of JPEG and PNG. A lossless WebP of 0.3 MB takes 369 MB."""

_EVERYDAY_BYTES: Final = 8 << 20


def is_everyday(content: Content, media_io: MediaIO[Any]) -> bool:
    """Return whether threads may decode a medium."""
    if not isinstance(media_io, ImageMediaIO):
        return False
    return len(content.data) <= _EVERYDAY_BYTES and bool(_EVERYDAY.match(content.data))


class UndecodableError(UnfetchableError):
    """A medium ended its decoders, or kept one for too long."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "undecodable")


class DecoderProcesses:
    """As many processes as there are threads that wait for one at a time. Thread-safe."""

    def __init__(self, policy: FetchPolicy) -> None:
        """Fork a server for them from this process, which should have few threads yet. Raises
        OSError.
        """
        self._policy = policy
        self._forks = Forks(decoder_child.__name__, fork_server.start(decoder_child, _TITLE))
        self._changing = threading.Lock()
        self._all: set[ChildProcess] = set()
        self._idle: list[ChildProcess] = []
        self._leaving: set[ChildProcess] = set()
        self._closed = False

    def decode(
        self,
        content: Content,
        media_io: MediaIO[Any],
        admit: Callable[[int], None],
        admit_frame: Callable[[int], None],
    ) -> Any:
        """Decode as :func:`frontend.fetch.decoders.decode` does. Blocks.

        Raises the same, and:
            UndecodableError: processes died of the medium, or hung.
            OverloadedError: no process can be had now.
        """
        allow(_KILLING_S)
        admitted = _Admitted(admit, admit_frame)
        medium = Medium(media_io, content.jpeg_frames, current_request.get())
        for _ in range(_ATTEMPTS):
            admitted.begin()
            try:
                with self._process() as process:
                    answer = self._ask(process, medium, content.data, admitted)
            except ProcessHungError as error:
                raise UndecodableError(
                    "decoding it did not end within its time limit (--media-decode-timeout)"
                ) from error
            except LOST:
                continue
            if isinstance(answer, NotDecoded):
                try:
                    raise answer.error
                finally:  # its traceback refers to this frame, which would live until a collection
                    del answer
            return answer
        raise UndecodableError("a decoder crashed on it, and so did the next")

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._all}

    def rest(self) -> None:
        """End the fork server, which keeps memory, where no medium is expected."""
        self._forks.rest()

    def close(self) -> None:
        """End all processes. Media that are being decoded fail."""
        self._forks.refuse()
        with self._changing:
            self._closed = True
            processes = list(self._all)
        if processes:
            with ThreadPoolExecutor(len(processes)) as threads:
                list(threads.map(ChildProcess.end, processes))
        with self._changing:
            for process in self._idle:
                process.close()
            self._idle.clear()
        self._forks.close()

    @contextmanager
    def _process(self) -> Iterator[ChildProcess]:
        """Have a process for one medium. It is ended if it is lost meanwhile, or leaves, or if part
        of its answer is unread: the next medium would get that."""
        process, why = self._take(), "was not heard out"
        try:
            yield process
            why = ""
        except ProcessHungError as error:
            why = str(error)
            raise
        except LOST:
            why = "died"
            raise
        finally:
            if why or process in self._leaving:
                self._end(process, why)
            else:
                self._put_back(process)

    def _take(self) -> ChildProcess:
        with self._changing:
            if self._closed:
                raise OverloadedError("the frontend is shutting down")
            if self._idle:
                return self._idle.pop()
        process: ChildProcess | None = None
        try:
            process = ChildProcess(StartUp(self._policy, log_setup()), self._forks)
            with self._changing:
                self._all.add(process)
            process.wait_until_ready()
        except (ProcessLostError, OSError, RuntimeError) as error:  # the last is a lack of threads
            if process is not None:
                self._end(process, "did not start")
            if OutOfFilesError.caused(error):
                raise OutOfFilesError from error
            raise OverloadedError(
                "no process to decode media can be started: try again later"
            ) from error
        return process

    def _put_back(self, process: ChildProcess) -> None:
        with self._changing:
            if not self._closed:
                self._idle.append(process)
                return
        self._end(process, "")

    def _end(self, process: ChildProcess, why: str) -> None:
        with self._changing:
            self._all.discard(process)
            self._leaving.discard(process)
            closed = self._closed
        try:
            process.end()
        finally:
            process.close()
        if closed:
            raise OverloadedError("the frontend is shutting down")
        if why:
            CHILD_RESTARTS.labels("decoder").inc()
            logger.warning("process %d, which decodes media, %s", process.pid, why)

    def _ask(
        self, process: ChildProcess, medium: Medium, data: bytes, admitted: "_Admitted"
    ) -> Any:
        """Return what was decoded, or NotDecoded."""
        connection: Connection[Any, Any] = process.connection
        with process.in_time(self._policy.decode_timeout_s) as deadline:
            connection.send(medium)
            connection.send_bytes(data)
            refusal: MmRouterError | None = None
            while isinstance(answer := connection.recv(), Wants):
                since = time.monotonic()
                deadline.extend(COPIES_WAIT_S)
                refusal = refusal or admitted.take(answer)
                waited = time.monotonic() - since
                deadline.extend(waited - COPIES_WAIT_S + seconds_for(answer.pixels))
                connection.send(refusal is None)
            if answer.leaves:
                self._leaving.add(process)
            decoded = _read(process, answer, data) if isinstance(answer, Decoded) else answer
            return decoded if refusal is None else NotDecoded(refusal, answer.leaves)


def fork_decoders(policy: FetchPolicy) -> DecoderProcesses | None:
    """Return processes, or log why this host has none: threads decode then."""
    try:
        return DecoderProcesses(policy)
    except OSError as error:
        logger.warning(
            "media are decoded in this process, which one that crashes a decoder can end: this "
            "host gives no pidfd or process (%s)",
            error,
        )
        return None


class _Admitted:
    """What a medium was granted. A second process is not granted the same again."""

    def __init__(self, admit: Callable[[int], None], admit_frame: Callable[[int], None]) -> None:
        self._ask = {False: admit, True: admit_frame}
        self._granted = {False: 0, True: 0}
        self.begin()

    def begin(self) -> None:
        """Begin to count what a process wants."""
        self._wanted = {False: 0, True: 0}

    def take(self, wants: Wants) -> MmRouterError | None:
        """Return why it is not granted."""
        kind = wants.of_frame
        self._wanted[kind] += wants.pixels
        if (more := self._wanted[kind] - self._granted[kind]) > 0:
            try:
                self._ask[kind](more)
            except MmRouterError as error:
                return error.with_traceback(None)  # its frames have the medium, and the error
            self._granted[kind] += more
        return None


class _Unpickler(pickle.Unpickler):
    """Puts the encoded bytes where they belong."""

    def __init__(self, pickled: bytes, encoded: bytes, arrays: list[npt.NDArray[np.uint8]]) -> None:
        super().__init__(BytesIO(pickled), buffers=arrays)
        self._encoded = encoded

    def persistent_load(self, pid: object) -> bytes:
        return self._encoded


def _read(process: ChildProcess, answer: Decoded, encoded: bytes) -> Any:
    """Return a decoded medium, whose arrays lie in one piece of memory."""
    takes = (-(-size // _ALIGNED) * _ALIGNED for size in answer.sizes)
    starts = list(accumulate(takes, initial=0))
    memory = np.empty(starts[-1], np.uint8)
    arrays = [memory[at : at + size] for at, size in zip(starts, answer.sizes, strict=False)]
    for array in arrays:
        process.receive_into(array.data)
    return _Unpickler(answer.pickled, encoded, arrays).load()

"""A process that decodes media for a frontend, forked by its fork server.

A medium that makes a library abort, hang or grow ends this process, and not the frontend.
"""

import errno
import gc
import logging
import os
import pickle
import resource
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any, Final

from PIL import Image
from vllm.multimodal.media import MediaIO

from common.errors import OutOfFilesError
from common.observability.log_lines import LogSetup, configure_logging, current_request
from common.observability.watchdog import WATCHDOG, allow
from common.transfer.pages import give_back_large_memory
from frontend.bounded.child_process import Ready
from frontend.bounded.memory_limit import MemoryLimit, is_out_of_memory, private_bytes
from frontend.fetch.content import Content, Digest
from frontend.fetch.decoders import decode, limit_decoders
from frontend.media_limits import FetchPolicy, MediaError, RefusedError, seconds_for

logger = logging.getLogger("frontend.fetch.decoder_child")

_ANY_BYTES: Final = 1 << 30
_FOR_BYTE: Final = 4
_FOR_PIXEL: Final = 48
_FOR_PIXEL_OF_FRAME: Final = 120
"""Memory for decoding: of any medium, and more for each encoded byte, each granted pixel, and each
pixel of one frame, of which a codec keeps 17, of up to six bytes a pixel."""

_NICENESS: Final = 10
"""The event loop goes first: eight films at a time on two cores kept other clients' chats for
0.32 s at the median, and for 0.09 s so."""

_KEPT_BYTES: Final = 256 << 20
"""Growth since its start beyond which a process is replaced."""


@dataclass(frozen=True)
class StartUp:
    """First message to a process: limits on media, and how the frontend logs."""

    policy: FetchPolicy
    log: LogSetup | None


@dataclass(frozen=True)
class Medium:
    """What to decode. Its bytes follow. ``request`` is the request's id, for log lines."""

    media_io: MediaIO[Any]
    jpeg_frames: bool
    request: str


@dataclass(frozen=True)
class Wants:
    """The process is about to decode so many pixels, or frames of so many pixels each. It gets a
    bool: whether there is room."""

    pixels: int
    of_frame: bool


@dataclass(frozen=True)
class Decoded:
    """A decoded medium, pickled but for its arrays, which follow in these sizes, and for its
    encoded bytes, to which each persistent id refers. ``leaves`` tells whether this was the
    process's last medium.
    """

    pickled: bytes
    sizes: list[int]
    leaves: bool


@dataclass(frozen=True)
class NotDecoded:
    """Why a medium was not decoded."""

    error: Exception
    leaves: bool


class _Pickler(pickle.Pickler):
    """Pickles a decoded medium without its encoded bytes, which the frontend has."""

    def __init__(self, file: BytesIO, encoded: bytes, arrays: list[memoryview]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda each: arrays.append(each.raw()))
        self._encoded = encoded

    def persistent_id(self, obj: object) -> bool | None:
        return True if obj is self._encoded else None

    def reducer_override(self, obj: object) -> Any:
        """Pickle the pixels of pictures as an array, and nothing else of their files."""
        if isinstance(obj, Image.Image) and obj.mode in ("L", "RGB", "RGBA"):
            return _picture, (obj.mode, obj.size, pickle.PickleBuffer(obj.tobytes()))
        return NotImplemented


def _picture(mode: str, size: tuple[int, int], pixels: memoryview) -> Image.Image:
    return Image.frombytes(mode, size, memoryview(pixels))


def _pickled(decoded: Any, encoded: bytes, arrays: list[memoryview]) -> bytes:
    _Pickler(file := BytesIO(), encoded, arrays).dump(decoded)
    return file.getvalue()


class DecoderChild:
    """The process's end of the socket pair."""

    def __init__(self, end: socket.socket) -> None:
        """Take the order."""
        self._end = end
        self._connection: Connection[Any, Any] = Connection(os.dup(end.fileno()))
        order: StartUp = self._connection.recv()
        if order.log is not None:
            name = f"{order.log.process} media {os.getpid()}"
            configure_logging(replace(order.log, process=name))
        limit_decoders(order.policy)
        self._policy = order.policy
        self._at_first = private_bytes()
        self._connection.send(Ready())

    def serve(self) -> None:
        """Decode until the frontend is gone, or until too much memory is kept."""
        with suppress(EOFError, ConnectionError):
            while not self._decode_next():
                pass

    def _decode_next(self) -> bool:
        """Return whether this process leaves. Raises EOFError or ConnectionError at the end."""
        medium: Medium = self._connection.recv()
        data = self._connection.recv_bytes()
        about = current_request.set(medium.request)
        pickled, arrays, failed = b"", list[memoryview](), None
        try:
            with WATCHDOG.telling("media"):
                pickled = _pickled(self._decode(medium, data), data, arrays)
        except Exception as error:  # noqa: BLE001 # told to the frontend, which raises it
            failed = _for_frontend(error)
            arrays.clear()
        finally:
            current_request.reset(about)
        sizes = [array.nbytes for array in arrays]
        leaves = self._keeps_too_much(sum(sizes))
        answer = Decoded(pickled, sizes, leaves) if failed is None else NotDecoded(failed, leaves)
        self._connection.send(answer)
        for array in arrays:
            self._end.sendall(array)
        return leaves

    def _decode(self, medium: Medium, data: bytes) -> Any:
        content = Content(data, Digest(b""), medium.jpeg_frames)
        with MemoryLimit(_ANY_BYTES + _FOR_BYTE * len(data)) as limit:

            def admit(pixels: int) -> None:
                self._ask(Wants(pixels, of_frame=False))
                limit.grow(_FOR_PIXEL * pixels)
                allow(seconds_for(pixels))

            def admit_frame(pixels: int) -> None:
                self._ask(Wants(pixels, of_frame=True))
                limit.grow(_FOR_PIXEL_OF_FRAME * pixels)

            return decode(content, medium.media_io, self._policy, admit, admit_frame)

    def _ask(self, wants: Wants) -> None:
        try:
            self._connection.send(wants)
            granted: bool = self._connection.recv()
        except (EOFError, ConnectionError):  # decoding would blame the medium
            sys.exit("the frontend is gone")
        if not granted:
            raise RefusedError("the frontend refuses it, and knows why")

    def _keeps_too_much(self, at_hand: int = 0) -> bool:
        most = self._at_first + at_hand + _KEPT_BYTES
        if private_bytes() > most:
            gc.collect()
        return private_bytes() > most


def _for_frontend(error: Exception) -> Exception:
    """Return the error that the frontend raises. It can be pickled."""
    if is_out_of_memory(error):
        logger.warning("decoding exceeded its memory limit: %s", str(error))
        return RefusedError("it takes far more memory to decode than one of its size needs")
    if OutOfFilesError.caused(error):
        return OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    match error:
        case MediaError():
            return RefusedError(error.reason)
        case ValueError():
            return ValueError(str(error))
    logger.error("decoding failed", exc_info=error)
    return RefusedError("it can't be decoded: it is damaged, or in an unknown format")


def main(descriptor: int) -> None:
    """Serve the frontend at the other end of a socket pair."""
    # Ctrl-C reaches the whole group; the frontend decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # each abort would leave a file of 0.5 GB
    os.nice(_NICENESS)
    give_back_large_memory()
    DecoderChild(socket.socket(fileno=descriptor)).serve()

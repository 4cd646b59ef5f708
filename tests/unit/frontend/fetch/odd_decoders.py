"""Decoders of films that do what a C library may do to its process."""

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

from vllm.multimodal.media import ImageMediaIO, VideoMediaIO


class OddIO(VideoMediaIO):
    """Does nothing but what is said here, with bytes that begin as a film does."""

    def __init__(self, marker: Path | None = None) -> None:
        super().__init__(ImageMediaIO())
        self.marker = marker

    def load_bytes(self, data: bytes) -> Any:
        return self.odd(), {"pid": os.getpid()}

    def odd(self) -> object:
        return None


class Aborts(OddIO):
    def odd(self) -> object:
        os.abort()


class IsKilledOnce(OddIO):
    """As the kernel kills for memory, whoever uses it."""

    def odd(self) -> object:
        assert self.marker is not None
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return None


class Hangs(OddIO):
    """Says that it has begun, and never returns."""

    def odd(self) -> object:
        if self.marker is not None:
            self.marker.touch()
        time.sleep(100_000)
        return None


class Grows(OddIO):
    def odd(self) -> object:
        pieces: list[bytes] = []
        while True:
            pieces.append(bytes(64 << 20))


class Keeps(OddIO):
    """Leaks 300 MiB."""

    kept: ClassVar[list[bytes]] = []

    def odd(self) -> object:
        self.kept.append(bytes(300 << 20))
        return None

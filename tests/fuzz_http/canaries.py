"""Addresses, paths and names that nothing may touch, and what notices if something does.

Three witnesses: a server that counts connections; a library that sees what all code of a process
calls, C and Rust included; Python's audit events, for imports above all. See ``spy/``.
"""

import base64
import contextlib
import os
import pickle
import re
import shutil
import socket
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARK: Final = "mmcanary"
"""Part of every canary, so that what has it in an argument is about one."""

_SPY: Final = Path(__file__).with_name("spy")
_LOG: Final = "FUZZ_SPY_LOG"
_NUMBER: Final = "CANARYNUMBER"
_PORT: Final = "CANARYPORT"
_DIRECTORY: Final = "CANARYDIRECTORY"
_PICKLE: Final = "CANARYPICKLE"
_ASKED_S: Final = 2.0
_LOOPBACK: Final = ("127.", "::ffff:127.", "::1", "localhost")


class _Opens:
    """What a pickle does as soon as something loads it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return open, (self._path,)


NAME: Final = f"{MARK}{_NUMBER}"
URL: Final = f"http://127.0.0.1:{_PORT}/{NAME}.png"
FILE: Final = f"file://{_DIRECTORY}/{NAME}.png"
TEXTS: Final = (
    URL,
    f"http://{NAME}.invalid/picture.png",
    FILE,
    f"{_DIRECTORY}/{NAME}.png",
    f"../../../../../../../..{_DIRECTORY}/{NAME}.png",
    f"{NAME}/model",
    f"{NAME}_module.{NAME}",
    f"{NAME}_module:{NAME}",
    _PICKLE,
)
"""Addresses, paths, a repository of Hugging Face's, modules of Python's, and a pickle. They are the
same in each run until :meth:`Canaries.fill` has put numbers, port and directory in."""


@dataclass(frozen=True)
class Touch:
    """Something that a process did.

    Attributes:
        call: a function of C's, or an event of Python's.
        about: its argument.
    """

    call: str
    about: str

    @property
    def is_network(self) -> bool:
        return self.call.startswith(("accept", "connect", "getaddrinfo", "socket."))

    @property
    def number(self) -> int | None:
        """Of the canary; None if it says no number."""
        found = re.search(rf"{MARK}(\d+)", self.about)
        return None if found is None else int(found[1])


class Canaries:
    """A server and a directory, and the log of those that spy."""

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: for all of it; made.
        """
        self.files = directory / "planted"
        self.files.mkdir(parents=True)
        self._log = directory / "touched.log"
        self._log.touch()
        self._read = 0
        self._library = directory / "spy.so"
        compiler = shutil.which("cc")
        self.seen_by_library = compiler is not None
        if compiler is not None:
            source = str(_SPY / "spy.c")
            command = [compiler, "-shared", "-fPIC", "-o", str(self._library), source, "-ldl"]
            subprocess.run(command, check=True, timeout=60)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._accepted: list[Touch] = []
        threading.Thread(target=self._accept, daemon=True, name="canaries").start()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that is to be spied on."""
        path = filter(None, (str(_SPY), os.environ.get("PYTHONPATH", "")))
        preload = {"LD_PRELOAD": str(self._library)} if self.seen_by_library else {}
        return {_LOG: str(self._log), "PYTHONPATH": os.pathsep.join(path), **preload}

    def fill(self, text: str, number: int = 0) -> str:
        """Put the addresses of this run into what was drawn, and a number by which what is touched
        is known again.
        """
        if _DIRECTORY in text:
            (self.files / f"{MARK}{number}.png").write_bytes(b"nothing to see here")
        opens = pickle.dumps(_Opens(f"/{MARK}{number}/pickled"))
        for name, value in (
            (_NUMBER, number),
            (_PORT, self.port),
            (_DIRECTORY, self.files),
            (_PICKLE, base64.b64encode(opens).decode()),
        ):
            text = text.replace(name, str(value))
        return text

    def touched(self) -> list[Touch]:
        """Return what was touched since the last call."""
        with self._log.open(encoding="utf-8", errors="replace") as log:
            log.seek(self._read)
            lines = log.read().splitlines()
            self._read = log.tell()
        touches = [Touch(*line.split("\t", 1)) for line in lines if "\t" in line]
        accepted, self._accepted = self._accepted, []
        return list(dict.fromkeys(each for each in [*touches, *accepted] if self._counts(each)))

    def close(self) -> None:
        self._server.close()

    def _counts(self, touch: Touch) -> bool:
        """Whether it is about a canary, or leaves this host."""
        if touch.call == "getaddrinfo":
            return not touch.about.startswith(_LOOPBACK)
        if touch.call == "connect":
            host, _, port = touch.about.rpartition(" ")
            return int(port) == self.port or not host.startswith(_LOOPBACK)
        return True

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_ASKED_S)
                asked = connection.recv(4096).partition(b"\r\n")[0]
                self._accepted.append(Touch("accept", asked.decode("latin-1")))
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

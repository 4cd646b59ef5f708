"""A directory as a place for cards, which frontends poll.

The end of a lease is measured by the reader's own monotonic clock. No two clocks are ever compared.
"""

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import SplitResult, unquote_to_bytes

from common.discovery.base import RENEW_S, Discovery, StreamWatcher
from common.discovery.file.files import Entry, Odd, Version, named_by, opened, read
from common.discovery.file.publisher import FileCardPublisher
from common.discovery.sealed_cards import NO_ROOM, CardRoom, KnownCard
from common.errors import ConfigurationError, DiscoveryError
from common.fleet_key import FleetKey
from common.observability.telemetry import DISCOVERY_ERRORS

logger = logging.getLogger(__name__)

LEASE_S: Final = 10.0  # a card about whose file nothing changed for this long is void

POLL_S: Final = 0.25

LONGEST_LOOK_S: Final = 1.0
"""More than this between two looks doesn't count: the reader itself stood still."""


@dataclass
class _Seen:
    """What a watcher knows of one file.

    Attributes: known: the card in it; None as long as there was none that could be one.
    unrenewed_s: how long nothing has changed about it. Infinite before a change was seen, for who
    knows how long ago its worker died. problem: why it can't be used, as it was said last.
    """

    known: KnownCard | None = None
    version: Version | None = None
    unrenewed_s: float = math.inf
    problem: str = ""


class FileCardWatcher(StreamWatcher):
    """Polls a directory for cards. The directory need not exist yet."""

    def __init__(
        self,
        directory: Path,
        key: FleetKey | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Cards that aren't sealed with the fleet's key are refused."""
        super().__init__(key)
        self._directory = directory
        self._clock = clock
        self._files: dict[str, _Seen] = {}
        self._room = CardRoom()
        self._left_out = False
        self._one_at_a_time = threading.Lock()  # a look goes on if its iteration is cancelled
        self._looked_at: float | None = None  # monotonic seconds; None before the first time

    async def _watched(self) -> AsyncGenerator[None, None]:
        while True:
            await asyncio.to_thread(self._look)
            self.note_success()
            yield
            await asyncio.sleep(POLL_S)

    def _look(self) -> None:
        """Note what has changed since the last look. Runs in a thread."""
        with self._one_at_a_time:
            self._look_once()

    def _look_once(self) -> None:
        now, first = self._clock(), not self.has_read
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now  # leases stand still while nothing can be read
        try:
            found = self._first_read() if first else self._read()
        except OSError as error:
            raise DiscoveryError(str(error)) from error
        self.has_read = True
        self._room.keep_only(found)
        for name in self._files.keys() - found.keys():
            self._end(self._files.pop(name))
        for name, entry in found.items():
            seen = self._files.get(name)
            if seen is None:
                seen = self._files[name] = _Seen(unrenewed_s=math.inf if first else 0.0)
            else:
                seen.unrenewed_s += passed
            self._judge(name, seen, entry)

    def _first_read(self) -> dict[str, Entry | Odd]:
        # So that nobody else makes it first. Where we can't, a worker may.
        with contextlib.suppress(OSError), opened(self._directory, create=True):
            pass
        return self._read()

    def _read(self) -> dict[str, Entry | Odd]:
        found: dict[str, Entry | Odd] = {}
        # Without the directory there are no cards; workers make it again.
        with contextlib.suppress(FileNotFoundError), opened(self._directory) as directory:
            names = os.listdir(directory)  # noqa: PTH208  # a descriptor
            # Those that are known first, so that no others take their room.
            for name in sorted(names, key=lambda name: name not in self._files):
                if not name.startswith(".") and name.endswith(".json"):
                    with contextlib.suppress(FileNotFoundError):  # withdrawn meanwhile
                        self._read_one(directory, name, found)
        self._say_left_out()
        return found

    def _read_one(self, directory: int, name: str, found: dict[str, Entry | Odd]) -> None:
        seen = self._files.get(name)
        if seen is None and self._room.is_full:
            self._room.left_out = True
            return
        entry = read(directory, name, None if seen is None else seen.version)
        size = entry.version.size if isinstance(entry, Entry) else 0
        if self._room.take(name, size):
            found[name] = entry

    def _say_left_out(self) -> None:
        left_out, self._room.left_out = self._room.left_out, False
        if left_out and not self._left_out:
            DISCOVERY_ERRORS.labels("size").inc()
            logger.warning("files in %s are skipped: %s", self._directory, NO_ROOM)
        self._left_out = left_out

    def _judge(self, name: str, seen: _Seen, entry: Entry | Odd) -> None:
        if isinstance(entry, Odd):
            if seen.problem != entry.what:
                seen.problem = entry.what
                DISCOVERY_ERRORS.labels(entry.reason).inc()
                logger.warning("%r in %s is skipped: %s", name, self._directory, entry.what)
        else:
            seen.problem = ""
            if entry.version != seen.version:
                self._changed(name, seen, entry)
        if seen.unrenewed_s > LEASE_S:
            self._end(seen)

    def _changed(self, name: str, seen: _Seen, entry: Entry) -> None:
        """A file is new, or its lease was renewed, or it has another content."""
        alive = seen.version is not None or math.isfinite(seen.unrenewed_s)
        seen.version = entry.version
        seen.known = seen.known or KnownCard(*named_by(name))
        renewed, change = seen.known.look(entry.content, self.key, alive=alive)
        if renewed:
            seen.unrenewed_s = 0.0
        self.tell(change)

    def _end(self, seen: _Seen) -> None:
        if seen.known is not None:
            self.tell(seen.known.end())


@dataclass(frozen=True)
class FileDiscovery(Discovery):
    """A directory of cards."""

    form: ClassVar[str] = "file:///absolute/directory"

    directory: Path

    @classmethod
    def from_url(cls, url: SplitResult) -> "FileDiscovery":
        if url.netloc not in ("", "localhost"):
            raise ConfigurationError(f"{url.netloc!r} is a host, and a directory is on this one")
        if url.query or url.fragment:
            raise ConfigurationError("it goes on behind a directory: write ? as %3F and # as %23")
        path = os.fsdecode(unquote_to_bytes(url.path))
        if not path.startswith("/") or "\0" in path:
            raise ConfigurationError("it names no absolute directory")
        return cls(Path(path))

    def __str__(self) -> str:
        return str(self.directory)

    def publisher(
        self, key: FleetKey | None = None, *, renew_s: float = RENEW_S
    ) -> "FileCardPublisher":
        return FileCardPublisher(self.directory, key, renew_s=renew_s)

    def watcher(self, key: FleetKey | None = None) -> "FileCardWatcher":
        return FileCardWatcher(self.directory, key)

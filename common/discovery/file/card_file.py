"""The file of one publisher, which others may remove or change behind its back."""

import contextlib
import logging
import os
import threading
from pathlib import Path

from common.discovery.file.files import READ, Version, opened, write
from common.errors import DiscoveryError
from common.observability.telemetry import DISCOVERY_ERRORS

logger = logging.getLogger(__name__)


class CardFile:
    """The file of a publisher. Its methods run in threads, one at a time, since a thread goes
    on when whoever waits for it is cancelled.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._one_at_a_time = threading.Lock()
        self._name = ""  # nothing is published
        self._content = b""
        self._written: Version | None = None
        self._removed = False

    def check(self) -> None:
        """Raises OSError or DiscoveryError if no file can be written here."""
        with opened(self._directory, create=True) as directory:
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True):
                raise DiscoveryError(f"nothing can be written to {self._directory}")

    def write(self, name: str, content: bytes) -> None:
        """Write the file, now or with the next renewal that succeeds."""
        with self._one_at_a_time:
            if self._removed:
                return
            self._name, self._content, self._written = name, content, None
            with opened(self._directory, create=True) as directory:
                self._written = write(directory, name, content)

    def renew(self) -> None:
        """Touch the file; write it again if it is not as we left it."""
        with self._one_at_a_time:
            if self._removed or not self._name:
                return
            with opened(self._directory, create=True) as directory:
                if self._touched(directory):
                    return
                self._written = write(directory, self._name, self._content)
        DISCOVERY_ERRORS.labels("lost").inc()
        logger.warning(
            "card %s was lost or changed by somebody else: written again",
            self._directory / self._name,
        )

    def remove(self) -> None:
        """Remove the file for good."""
        with self._one_at_a_time:
            self._removed = True
            if not self._name:
                return
            with contextlib.suppress(FileNotFoundError), opened(self._directory) as directory:
                os.unlink(self._name, dir_fd=directory)

    def _touched(self, directory: int) -> bool:
        """Renew the lease of the file that we wrote, if it is still there as it was."""
        try:
            descriptor = os.open(self._name, READ, dir_fd=directory)
        except OSError:
            return False
        try:
            if Version.of(os.fstat(descriptor)) != self._written:
                return False
            os.utime(descriptor)
            self._written = Version.of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        return True

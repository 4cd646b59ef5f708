"""The keys of users and admins: those of flags, and those that are in the files by now."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from common.errors import ConfigurationError
from frontend.http.access.api_keys import Keys, read_keys
from frontend.http.settings import KeySettings

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often they are looked at."""


class FollowedFiles(ABC):
    """Some files. A link that leads to another file is a change, as Kubernetes makes them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._seen = self._state()

    @abstractmethod
    async def changed(self) -> None:
        """Take what is in the files now, or log why it can't be taken."""

    async def follow(self) -> None:
        """Look again and again, if there are any."""
        while self._paths:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take what is in the files, if one is another than at the last look."""
        state = await asyncio.to_thread(self._state)
        if state != self._seen:
            self._seen = state
            await self.changed()

    def _state(self) -> list[tuple[int, int, int] | None]:
        state: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                found = path.stat()
            except OSError:
                state.append(None)  # it is being replaced
            else:
                state.append((found.st_ino, found.st_mtime_ns, found.st_size))
        return state


class AccessKeys(FollowedFiles):
    """All keys that are in force.

    Attributes:
        users: None to let everybody in.
        admins: open what only admins may see; None if they come from this host.
    """

    def __init__(self, given: Sequence[str], settings: KeySettings) -> None:
        """
        Args:
            given: to users, by flags or the environment.

        Raises:
            ConfigurationError: a file can't be read or holds no key, or a key is of both kinds.
        """
        self._given = given
        self._settings = settings
        files = (settings.api_key_file, settings.admin_key_file)
        # Before the files are read, or a change in between would go unseen.
        super().__init__(file for file in files if file is not None)
        users, admins = self._read()
        self.users = Keys(users) if users else None
        self.admins = Keys(admins) if admins else None

    @property
    def several(self) -> bool:
        """Whether there is more than one user."""
        return self.users is not None and len(self.users) > 1

    async def changed(self) -> None:
        """Take the keys that are in the files.

        Requests that were let in go on. Files that can't be used leave the keys as they are.
        """
        try:
            users, admins = await asyncio.to_thread(self._read)
        except ConfigurationError as error:
            logger.warning("the key files have changed, but the keys stay as they are: %s", error)
            return
        for keys, now in ((self.users, users), (self.admins, admins)):
            if keys is not None:
                keys.replace(now)
        logger.info(
            "the key files have changed: %d API keys and %d admin keys are in force",
            len(users),
            len(admins),
        )

    def _read(self) -> tuple[list[str], list[str]]:
        settings = self._settings
        users = [*self._given]
        if settings.api_key_file is not None:
            users += read_keys(settings.api_key_file)
        file = settings.admin_key_file
        admins = [] if file is None else read_keys(file, "admin")
        if not set(admins).isdisjoint(users):
            raise ConfigurationError(f"an admin key in {file} is an API key as well")
        return list(dict.fromkeys(users)), admins

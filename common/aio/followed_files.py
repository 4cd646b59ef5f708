"""Files that are looked at again and again, so that changes count without a restart."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Final

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

"""Whether files have changed since somebody looked: their state, at the cost of a few calls."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

LOOK_S: Final = 5.0
"""How often files are looked at, by whoever follows some."""


class FileChanges:
    """Changes of some files. A link that leads to another file is one, as Kubernetes makes them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._seen = self._state()

    async def any(self) -> bool:
        """Return whether a file is another than at the last call, or has gone or come."""
        state = await asyncio.to_thread(self._state)
        seen, self._seen = self._seen, state
        return state != seen

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

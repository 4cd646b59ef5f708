"""Who uses a frontend's memory: each session has a hold on it, the last one lets go of it.

A frontend that reconnects has, for a while, two sessions over the same memory: what the old
one gives up must not be taken from the new one.
"""

from collections import Counter
from collections.abc import Callable


class Attachment:
    """One session's hold on the memory of a frontend."""

    def __init__(self, let_go: Callable[[], None] = lambda: None) -> None:
        self._let_go: Callable[[], None] | None = let_go

    def detach(self) -> None:
        """Give up this hold and no other. The second and later calls do nothing; items that
        were received stay usable.
        """
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


class Attachments:
    """Counts the holds on what has a name. For one event loop."""

    def __init__(self, let_go: Callable[[str], None]) -> None:
        """
        Args:
            let_go: gets a name whose last hold was given up.
        """
        self._let_go = let_go
        self._holds: Counter[str] = Counter()

    def add(self, name: str) -> Attachment:
        """One more hold on a name."""
        self._holds[name] += 1
        return Attachment(lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        self._holds[name] -= 1
        if not self._holds[name]:
            del self._holds[name]
            self._let_go(name)

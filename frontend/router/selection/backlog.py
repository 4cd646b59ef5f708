"""How long each target is busy with prompts that were sent there and have no output yet. No I/O.

An engine computes prompts in the order in which they came, so each target has a moment by which it
is through with all of them, as far as their work was reckoned right. A first output says which of
them are left: what is reckoned wrong is wrong until then only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from common.identity import RequestId, Target

_OVERDUE: Final = 0.25
"""Share of its work that a target still has before it, at least, while outputs are missing: they
may be on their way, or the work was more than was reckoned."""


@dataclass(slots=True)
class _Line:
    """The prompts of one target.

    Attributes:
        count: how many.
        tokens: to compute.
        ms: their work.
        free_at: when it is through with them, in monotonic seconds.
    """

    count: int = 0
    tokens: int = 0
    ms: float = 0.0
    free_at: float = 0.0


class Backlog:
    """The prompts of all targets.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines: dict[Target, _Line] = {}
        self._prompts: dict[RequestId, tuple[_Line, int, float]] = {}

    def started(self, request_id: RequestId, target: Target, tokens: int, ms: float) -> None:
        """A prompt was sent.

        Args:
            tokens: to compute.
            ms: that takes.
        """
        self.computed(request_id)
        line = self._lines.setdefault(target, _Line())
        line.count += 1
        line.tokens += tokens
        line.ms += ms
        line.free_at = max(line.free_at, self._clock()) + ms / 1e3
        self._prompts[request_id] = line, tokens, ms

    def computed(self, request_id: RequestId) -> None:
        """It has an output, or ended without. Unknown and repeated ids are ignored."""
        found = self._prompts.pop(request_id, None)
        if found is None:
            return
        line, tokens, ms = found
        line.count -= 1
        line.tokens -= tokens
        line.ms = line.ms - ms if line.count else 0.0  # floats don't add up to nothing
        line.free_at = min(line.free_at, self._clock() + line.ms / 1e3)

    def drop(self, target: Target) -> None:
        """It is gone. Its prompts may still be said to have been computed."""
        self._lines.pop(target, None)

    def count(self, target: Target) -> int:
        """Prompts without an output."""
        line = self._lines.get(target)
        return 0 if line is None else line.count

    def tokens(self, target: Target) -> int:
        """Tokens of theirs to compute."""
        line = self._lines.get(target)
        return 0 if line is None else line.tokens

    def waits(self, now: float, *, in_time: bool) -> list[tuple[Target, float]]:
        """How long a prompt that comes now waits for others, where there are any, in milliseconds.

        Args:
            now: monotonic seconds.
            in_time: whether work takes what was reckoned, so that some of it is done by now.
        """
        return [
            (target, _left(line, now) if in_time else line.ms)
            for target, line in self._lines.items()
            if line.count
        ]

    def wait_ms(self, target: Target, now: float, *, in_time: bool) -> float:
        """The same for one target."""
        line = self._lines.get(target)
        if line is None or not line.count:
            return 0.0
        return _left(line, now) if in_time else line.ms


def _left(line: _Line, now: float) -> float:
    return min(line.ms, max((line.free_at - now) * 1e3, _OVERDUE * line.ms))

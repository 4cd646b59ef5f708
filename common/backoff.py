"""Exponential backoff between retries."""

import math


class Backoff:
    """Compute exponentially growing pauses. Never sleeps, so it serves loops and threads."""

    def __init__(self, first_s: float, longest_s: float, *, calm_s: float = math.inf) -> None:
        """Limit pauses to ``longest_s``. A try that ran for ``calm_s`` resets the backoff."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._calm_s = calm_s
        self._next_s = first_s

    def next_s(self, ran_s: float = 0.0) -> float:
        """Return the seconds to wait after a try of ``ran_s`` seconds; double the next pause."""
        if ran_s > self._calm_s:
            self.reset()
        now = self._next_s
        self._next_s = min(2 * now, self._longest_s)
        return now

    def reset(self) -> None:
        self._next_s = self._first_s

"""Exponential backoff between tries."""

import math


class Backoff:
    """Say how long to wait before each try: twice as long each time, up to a limit.

    It waits for nothing itself, so it serves event loops and threads.
    """

    def __init__(self, first_s: float, longest_s: float, *, calm_s: float = math.inf) -> None:
        """
        Args:
            first_s: seconds before the second try.
            longest_s: limit of all later pauses.
            calm_s: a try that ran for longer was a success.
        """
        self._first_s = first_s
        self._longest_s = longest_s
        self._calm_s = calm_s
        self._next_s = first_s

    def next_s(self, ran_s: float = 0.0) -> float:
        """Return the seconds to wait now; the next call returns twice as many.

        Args:
            ran_s: how long the try took that has just failed.
        """
        if ran_s > self._calm_s:
            self.reset()
        now = self._next_s
        self._next_s = min(2 * now, self._longest_s)
        return now

    def reset(self) -> None:
        self._next_s = self._first_s

"""When to look for events that did not arrive: soon after something may have been
missed, and when a worker serves requests without sending any."""

_SETTLE_S = 0.3
"""After connecting, until the publisher surely knows the subscription."""

SILENCE_S = 2.0
"""How long a worker may serve without the events that should follow before its event stream is
checked: some steps of a slow engine."""

_MUTE_LIMIT = 3
"""Silences, each confirmed by a replay, after which the state says so."""


class Watch:
    """Moments are monotonic seconds.

    Args:
        silence_s: how long a serving worker may be silent, in seconds.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._look_at: float | None = None
        self._silent_since: float | None = None
        self._last_event = float("-inf")
        self._silences = 0

    def heard_live(self, now: float) -> None:
        """A live message came."""
        self._silent_since = None
        self._silences = 0
        self._last_event = now

    def heard_replayed(self, now: float) -> None:
        """A replay brought an event that was missing."""
        self._last_event = now

    def served(self, routed_at: float, now: float) -> None:
        """A request that must have stored blocks ended.

        Args:
            routed_at: when it was routed.
        """
        if self._last_event < routed_at and self._silent_since is None:
            self._silent_since = now

    def look_soon(self, now: float) -> None:
        """Something may be missing: look once what is on its way has arrived."""
        self._look_at = now + _SETTLE_S

    def look_at(self, moment: float) -> None:
        """Look at this moment, instead of another that was arranged."""
        self._look_at = moment

    def due(self, now: float) -> bool:
        """Whether to look now. If so, what was arranged is thereby done."""
        if self.silent(now) or (self._look_at is not None and now >= self._look_at):
            self._look_at = None
            return True
        return False

    def silent(self, now: float) -> bool:
        """Whether the worker has served for too long without sending anything."""
        return self._silent_since is not None and now - self._silent_since >= self._silence_s

    def silence_over(self, *, confirmed: bool = False) -> None:
        """A silence was dealt with; the next begins with a request that ends later.

        Args:
            confirmed: whether a replay has shown that there was nothing to send.
        """
        self._silent_since = None
        self._silences += confirmed

    @property
    def mute(self) -> bool:
        """Whether so many silences in a row were confirmed that it publishes nothing."""
        return self._silences >= _MUTE_LIMIT

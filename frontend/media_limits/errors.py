"""Errors about media: half a sentence for the user, a word for the metric.

The reason completes "Failed to load media from …: ". It names only text that the user wrote: no
resolved address, no redirect target, no local path.
"""

from http import HTTPStatus

from common.errors import MmRouterError


class MediaError(MmRouterError):
    """Root of these errors; ``outcome`` is the label of ``mmrouter_media_fetches``."""

    def __init__(self, reason: str, outcome: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.outcome = outcome


class RefusedError(MediaError):
    """The policy forbids the reference, or it is malformed."""

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "refused")


class RequestLimitError(RefusedError):
    """One request exceeds its own limit. Other requests are not affected."""


class UnfetchableError(MediaError):
    """The reference is valid, but its medium is unavailable; a retry may help if ``transient``."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY

    def __init__(self, reason: str, outcome: str, *, transient: bool = False) -> None:
        super().__init__(reason, outcome)
        self.transient = transient


class TooLargeError(UnfetchableError):
    """More bytes than the policy allows."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"it is larger than {max_bytes / 2**20:g} MiB", "too_large")

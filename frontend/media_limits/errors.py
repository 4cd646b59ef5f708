"""Why a medium was not obtained: half a sentence for the user, a word for the metric.

The reason completes "Failed to load media from …: ". It names nothing that the user
did not write: no resolved address, no redirect target, no path of ours.
"""

from http import HTTPStatus

from common.errors import MmRouterError


class MediaError(MmRouterError):
    """Root of this package's errors.

    Attributes:
        reason: half a sentence, without a full stop.
        outcome: label of ``mmrouter_media_fetches``.
    """

    def __init__(self, reason: str, outcome: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.outcome = outcome


class RefusedError(MediaError):
    """The policy forbids what the request asks for, or the reference makes no sense."""

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "refused")


class RequestLimitError(RefusedError):
    """It would be more than one request may ask for. Concerns no other request."""


class UnfetchableError(MediaError):
    """The reference is fine, but what it names can't be had.

    Attributes:
        transient: whether another attempt may succeed.
    """

    status = HTTPStatus.UNPROCESSABLE_ENTITY

    def __init__(self, reason: str, outcome: str, *, transient: bool = False) -> None:
        super().__init__(reason, outcome)
        self.transient = transient


class TooLargeError(UnfetchableError):
    """More bytes than the policy takes."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"it is larger than {max_bytes / 2**20:g} MiB", "too_large")

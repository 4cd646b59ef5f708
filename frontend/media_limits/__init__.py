"""Policy for media: allowed addresses, sizes, and budgets of bytes and pixels in memory."""

from frontend.media_limits.budget import (
    COPIES_WAIT_S,
    MEGAPIXEL,
    MIB,
    Budget,
    Copies,
    MediaBudgets,
    Reservation,
    seconds_for,
)
from frontend.media_limits.policy import (
    FetchPolicy,
    MediaError,
    MediaRule,
    RefusedError,
    RequestLimitError,
    TooLargeError,
    UnfetchableError,
    parse_url,
)

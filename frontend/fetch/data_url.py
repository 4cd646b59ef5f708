"""Reading data URLs (RFC 2397). Copies megabytes: not for the event loop."""

import pybase64

from frontend.fetch.content import Content
from frontend.media_limits import RefusedError, TooLargeError

PREFIX = "data:"


def is_data_url(url: str) -> bool:
    """Whether a URL carries its medium inside it."""
    return url[: len(PREFIX)].lower() == PREFIX


def read_data_url(url: str, max_bytes: int, *, jpeg_frames: bool) -> Content:
    """The medium in a data URL.

    Args:
        url: it may have hundreds of megabytes, so no copy is made before it is measured.
        jpeg_frames: whether ``video/jpeg`` means a sequence of pictures.

    Raises:
        RefusedError: it is no data URL in base64.
        TooLargeError: the medium is larger than ``max_bytes``.
        ValueError: what should be base64 isn't.
    """
    comma = url.find(",")
    if comma < 0:
        raise RefusedError("a data URL needs a comma before its data")
    media_type, *parameters = url[len(PREFIX) : comma].split(";")
    if not parameters or parameters[-1] != "base64":
        raise RefusedError("only data URLs in base64 are understood")
    encoded_length = len(url) - comma - 1
    if encoded_length * 3 // 4 > max_bytes + 2:  # up to two characters are padding
        raise TooLargeError(max_bytes)
    encoded = url[comma + 1 :]
    if jpeg_frames and media_type.lower() == "video/jpeg":
        return Content.of(encoded.encode(), jpeg_frames=True)
    data = pybase64.b64decode(encoded, validate=True)
    if len(data) > max_bytes:
        raise TooLargeError(max_bytes)
    return Content.of(data)

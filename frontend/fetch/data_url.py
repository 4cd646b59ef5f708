"""Read data URLs (RFC 2397). Copies megabytes: not for the event loop."""

import re
from collections.abc import Iterator
from typing import Final

import pybase64

from frontend.fetch.content import Content
from frontend.media_limits import RefusedError, TooLargeError

PREFIX = "data:"

_SCHEME: Final = re.compile(r"\s{,16}[a-z][a-z0-9+.-]{1,64}:", re.IGNORECASE)
_MAX_HEAD: Final = 8 << 10
"""Characters of a data URL before its data. Parameters by the million are an object each."""

_LONGEST: Final = 3
"""Characters of an escape, the longest form of a base64 character."""
_SPACES: Final = (b"\n", b"\r", b" ", b"\t", b"\f")
_ESCAPES: Final = tuple(
    (f"%{code}".encode(), bytes.fromhex(code))
    for code in ("2B", "2b", "2F", "2f", "3D", "3d", "0D", "0d", "0A", "0a", "20", "09")
)
"""Escapes in base64; clients never escape letters."""
_PIECE: Final = 1 << 18
"""Bytes unescaped at a time: between two pieces the event loop gets the interpreter's lock."""


def is_data_url(url: str) -> bool:
    return url[: len(PREFIX)].lower() == PREFIX


def has_scheme(url: str) -> bool:
    """Return whether text begins as a URL does: a path or bare base64 doesn't, nor does ``C:``."""
    return _SCHEME.match(url) is not None


def read_data_url(url: str, max_bytes: int, *, jpeg_frames: bool) -> Content:
    """Read a data URL in the forms of base64 that browsers take: white space, escapes (``%2B``), no
    padding.

    It may have hundreds of megabytes, so no copy is made before it is measured. With
    ``jpeg_frames``, ``video/jpeg`` means a sequence of pictures. Raises RefusedError if it is not
    in base64, TooLargeError beyond ``max_bytes``.
    """
    comma = url.find(",", 0, _MAX_HEAD)
    if comma < 0:
        raise RefusedError(
            f"a data URL needs a comma before its data, in its first {_MAX_HEAD} characters"
        )
    media_type, *parameters = url[len(PREFIX) : comma].split(";")
    if not parameters or parameters[-1].strip(" ").lower() != "base64":
        raise RefusedError("only data URLs in base64 are understood")
    encoded = _plain(url[comma + 1 :], max_bytes)
    if jpeg_frames and media_type.lower() == "video/jpeg":
        return Content.of(encoded, jpeg_frames=True)
    try:
        data = pybase64.b64decode(encoded + _padding(encoded), validate=True)
    except ValueError as error:
        raise RefusedError(f"its data is no base64: {error}") from error
    if len(data) > max_bytes:
        raise TooLargeError(max_bytes)
    return Content.of(data)


def _plain(text: str, max_bytes: int) -> bytes:
    """Return base64 without white space and escapes. Raises TooLargeError, RefusedError."""
    most = max_bytes + 2  # up to two characters are padding
    if len(text) * 3 // 4 > most * _LONGEST:
        raise TooLargeError(max_bytes)
    try:
        encoded = text.encode("ascii")
    except UnicodeEncodeError:
        raise RefusedError("its data is no base64: it has characters beyond ASCII") from None
    if "%" in text:
        encoded = b"".join(map(_unescaped, _pieces(encoded)))
    if any(space in encoded for space in _SPACES):
        encoded = encoded.translate(None, b"".join(_SPACES))
    if len(encoded) * 3 // 4 > most:
        raise TooLargeError(max_bytes)
    return encoded


def _pieces(encoded: bytes) -> Iterator[bytes]:
    """Yield bytes in pieces that end in no escape."""
    at = 0
    while at < len(encoded):
        end = at + _PIECE
        cut = encoded.rfind(b"%", end - _LONGEST + 1, end)
        end = end if cut < 0 else cut
        yield encoded[at:end]
        at = end


def _unescaped(encoded: bytes) -> bytes:
    for escape, meant in _ESCAPES:
        encoded = encoded.replace(escape, meant)
    if b"%" in encoded:  # 60 MB of them would take a thread seconds
        raise RefusedError("its data is no base64: it has escapes of other characters")
    return encoded


def _padding(encoded: bytes) -> bytes:
    return b"" if encoded.endswith(b"=") else b"=" * (-len(encoded) % 4)

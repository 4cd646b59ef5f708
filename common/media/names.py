"""Name a file's format from its leading bytes, for error messages."""

from typing import Final

from common.media.formats import WEB_PAGE, name_of_unread

_LEADING: Final = (
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x1a\x45\xdf\xa3", "Matroska or WebM"),
    (b"RIFF", "a sound or film (RIFF)"),
    (b"OggS", "Ogg"),
    (b"fLaC", "FLAC"),
    (b"ID3", "MP3"),
    (b"\x89PNG", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"{", "JSON"),
    (b"[", "JSON"),
    (b"<", "XML"),
)
_START: Final = 1024


def is_web_page(data: bytes) -> bool:
    """Return whether data is HTML, as servers send it where a file is not."""
    return name_of_unread(_text(data)) == WEB_PAGE


def name_of(data: bytes) -> str | None:
    """Return the name of a format, or None for one that is not known."""
    text = _text(data)
    if (unread := name_of_unread(data) or name_of_unread(text)) is not None:
        return unread
    if data[4:8] == b"ftyp":
        return "MP4 or QuickTime"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    found = (name for start, name in _LEADING if data.startswith(start) or text.startswith(start))
    return next(found, None)


def _text(data: bytes) -> bytes:
    return data[:_START].removeprefix(b"\xef\xbb\xbf").lstrip()

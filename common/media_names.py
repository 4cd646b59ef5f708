"""Names of formats for errors, as users know them: told by leading bytes."""

import re
from typing import Final

_START: Final = 1024
_BRANDS: Final = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"hevc": "HEIC",
    b"mif1": "HEIF",
}
"""Of pictures in the containers of MP4."""

_LEADING: Final = (
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"8BPS", "PSD"),
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
)
_HTML: Final = re.compile(rb"<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)


def is_web_page(data: bytes) -> bool:
    """Return whether data is HTML, as servers send it where a file is not."""
    return _HTML.match(_text(data)) is not None


def name_of(data: bytes) -> str | None:
    """Return the name of a format, or None for one that is not known."""
    if data[4:8] == b"ftyp":
        brands = [data[8:12], *(data[at : at + 4] for at in range(16, 64, 4))]
        return next((_BRANDS[brand] for brand in brands if brand in _BRANDS), "MP4 or QuickTime")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    text = _text(data)
    if is_web_page(data):
        return "a web page (HTML)"
    if text.startswith(b"<"):
        return "SVG" if b"<svg" in text else "XML"
    found = (name for start, name in _LEADING if data.startswith(start) or text.startswith(start))
    return next(found, None)


def _text(data: bytes) -> bytes:
    return data[:_START].removeprefix(b"\xef\xbb\xbf").lstrip()

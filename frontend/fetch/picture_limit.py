"""Count a picture's pixels by its header, and refuse pictures that take hours."""

import re
import struct
import zlib
from io import BytesIO
from typing import Final

from PIL import Image, TiffImagePlugin, UnidentifiedImageError
from vllm.multimodal import image

from common.media.avif_size import UnreadAvifError, avif_pixels
from common.media.formats import AVIF, IMAGE_FORMATS, name_of
from common.media.picture_metadata import MetadataError
from frontend.media_limits import FetchPolicy, RefusedError

_SIZE_UNKNOWN: Final = frozenset({"ICO"})
"""Formats with whole pictures inside, whose size may not be in the header."""

_NARROW: Final = 16
"""Minimum pixels that each row counts for."""

_MAX_SCANS: Final = 100
"""Scans of a JPEG, libtiff's own limit. Each takes a few bytes only, but decoding all pixels."""

_PNG_START: Final = 8
_LONG: Final = struct.Struct(">I")

_SIDES: Final = (
    TiffImagePlugin.TILEWIDTH,
    TiffImagePlugin.TILELENGTH,
    TiffImagePlugin.IMAGEWIDTH,
    TiffImagePlugin.IMAGELENGTH,
)
"""Of a TIFF's tile, and of the picture."""

_MARKER: Final = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""JPEG markers, except those without a segment."""

_SEGMENT: Final = re.compile(rb"\xff[\xc0-\xc7\xc9-\xcf\xda-\xef\xfe]")
"""The same as Pillow reads them: it skips no segment of the others."""

_MAX_SEGMENTS: Final = 4_096
_MAX_CHUNKS: Final = 1 << 18
"""Chunks of a PNG, of which Pillow reads fewer."""

_MAX_EXIF: Final = 64
"""Segments of a JPEG with EXIF, which Pillow puts together in quadratic time: 17 MB of one-byte
segments took minutes."""

_STRIDE: Final = 1 << 20
"""Bytes in which a pattern is searched at a time, since it holds the GIL: 0.3 s for 60 MB."""


def picture_pixels(data: bytes, policy: FetchPolicy) -> int:
    """Return the pixels of a decoded picture, without decoding it.

    Raises:
        RefusedError: too many for one picture.
        MetadataError: too many tags, comments or the like to read.
        ValueError: it is no picture.
        Image.DecompressionBombError: as RefusedError, from Pillow.
    """
    if data.startswith(b"\xff\xd8") and _has_too_many_segments(data):
        raise MetadataError
    try:
        with image.open_image(BytesIO(data)) as opened:
            pixels = max(stored_pixels(opened), _tile_pixels(opened))
            if opened.format == AVIF:
                pixels = max(pixels, avif_pixels(data))
            if opened.format in _SIZE_UNKNOWN:
                pixels = max(pixels, policy.max_pixels)
            if opened.format in ("JPEG", "MPO") and _has_too_many_scans(data):
                raise RefusedError(f"it has more than {_MAX_SCANS} scans")
            if opened.format == "PNG":
                _check_png(data)
    except UnidentifiedImageError as error:
        raise RefusedError(_unread(data)) from error
    except UnreadAvifError as error:
        raise RefusedError(str(error)) from error
    except OSError as error:
        raise ValueError(f"Failed to load image: {error}") from error  # in vLLM's words
    if pixels > policy.max_pixels:
        raise too_many_pixels(policy, pixels)
    return pixels


def stored_pixels(opened: Image.Image) -> int:
    """Return the pixels of memory: a row has a pointer and is aligned, so 60 million rows of one
    pixel took 1.4 GB.
    """
    return max(opened.width, _NARROW) * opened.height


def too_many_pixels(policy: FetchPolicy, pixels: int | None = None) -> RefusedError:
    size = "too many" if pixels is None else f"{pixels:,}"
    most = f"{policy.max_pixels:,} (--media-max-pixels)"
    return RefusedError(f"it has {size} pixels, which is too large: at most {most} are taken")


def said_by_pillow(error: Image.DecompressionBombError) -> int | None:
    """Return the pixels of a picture that Pillow finds too large."""
    found = re.search(r"\((\d+) pixels\)", str(error))
    return None if found is None else int(found[1])


def _unread(data: bytes) -> str:
    name = "empty" if not data else name_of(data) or "in no known format"
    if name.upper() in IMAGE_FORMATS:
        return f"it begins as {name}, but is cut off or damaged"
    *first, last = sorted(set(IMAGE_FORMATS) - {"DIB"})
    return f"it is {name}, not a picture that is read here: {', '.join(first)} or {last}"


def _search(pattern: re.Pattern[bytes], data: bytes, begin: int) -> re.Match[bytes] | None:
    for at in range(begin, len(data), _STRIDE):
        if found := pattern.search(data, at, at + _STRIDE + 1):
            return found
    return None


def _has_too_many_segments(data: bytes) -> bool:
    at, exif = 2, 0
    for _ in range(_MAX_SEGMENTS):
        marker = _search(_SEGMENT, data, at)
        if marker is None or marker[0][1] == 0xDA:
            return False
        at = marker.end()
        exif += data.startswith(b"Exif", at + 2)
        at += max(2, int.from_bytes(data[at : at + 2], "big"))
        if exif > _MAX_EXIF:
            break
    return True


def _check_png(data: bytes) -> None:
    """Raise RefusedError for a PNG that is cut off or damaged, which Pillow may not notice."""
    view = memoryview(data)
    at = _PNG_START
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(view):
            break
        length, kind = struct.unpack_from(">I4s", view, at)
        end = at + 8 + length
        if kind == b"IEND":
            return
        if end + 4 > len(view):
            break
        if kind == b"IDAT" and zlib.crc32(view[at + 4 : end]) != _LONG.unpack_from(view, end)[0]:
            raise RefusedError("its pixels are damaged (a checksum is wrong)")
        at = end + 4
    else:
        raise MetadataError
    raise RefusedError("it is cut off")


def _tile_pixels(opened: Image.Image) -> int:
    """Return the pixels of a TIFF's tile, or half of those of all tiles if more: each is decoded
    whole, however little of it is shown. 70 KB of 1,024 tiles took minutes.
    """
    if not isinstance(opened, TiffImagePlugin.TiffImageFile):
        return 0
    width, height, *shown = (
        side if isinstance(side, int) and side > 0 else 0 for side in map(opened.tag_v2.get, _SIDES)
    )
    if not width * height:
        return 0
    across, down = (-(-side // tile) for side, tile in zip(shown, (width, height), strict=True))
    return max(1, across * down // 2) * width * height


def _has_too_many_scans(data: bytes) -> bool:
    scans = 0
    at = 2
    for _ in range(_MAX_SEGMENTS):
        marker = _search(_MARKER, data, at)
        if marker is None or marker[0][1] == 0xD9:  # data after the end is not read
            return False
        scans += marker[0][1] == 0xDA
        if scans > _MAX_SCANS:
            return True
        at = marker.end()
        at += max(2, int.from_bytes(data[at : at + 2], "big"))
    raise MetadataError

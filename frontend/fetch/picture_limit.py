"""How many pixels a picture has, by its header, and whether it is one that takes hours."""

import re
import struct
import zlib
from io import BytesIO
from typing import Final

from PIL import Image, TiffImagePlugin, UnidentifiedImageError
from vllm.multimodal import image

from common.media.avif_size import UnreadAvifError, avif_pixels
from common.media.formats import AVIF, IMAGE_FORMATS, name_of
from frontend.media_limits import FetchPolicy, RefusedError

_SIZE_UNKNOWN: Final = frozenset({"ICO"})
"""Formats with whole pictures inside, of a size that the header need not tell."""

_NARROW: Final = 16
"""Pixels that each row of a picture counts for at least."""

_MOST_SCANS: Final = 100
"""Of a JPEG, libtiff's own limit. Each goes over all pixels, but takes a few bytes only."""

_PNG_START: Final = 8
_LONG: Final = struct.Struct(">I")

_MARKER: Final = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""Of JPEG, those that stand alone aside."""


def picture_pixels(data: bytes, policy: FetchPolicy) -> int:
    """Pixels that a picture takes when it is decoded; nothing is decoded to find out.

    Raises:
        RefusedError: more than one picture may have.
        ValueError: it is no picture.
        Image.DecompressionBombError: as RefusedError, from Pillow.
    """
    try:
        with image.open_image(BytesIO(data)) as opened:
            pixels = max(stored_pixels(opened), _tile_pixels(opened))
            if opened.format == AVIF:
                pixels = max(pixels, avif_pixels(data))
            if opened.format in _SIZE_UNKNOWN:
                pixels = max(pixels, policy.max_pixels)
            if opened.format in ("JPEG", "MPO") and _has_too_many_scans(data):
                raise RefusedError(f"it has more than {_MOST_SCANS} scans")
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
    """Return the pixels that a picture takes memory for: a row has a pointer and is aligned, so 60
    million rows of one pixel took 1.4 GB."""
    return max(opened.width, _NARROW) * opened.height


def too_many_pixels(policy: FetchPolicy, pixels: int | None = None) -> RefusedError:
    """The error for a picture that is too large.

    Args:
        pixels: that it has, if that is known.
    """
    size = "too many" if pixels is None else f"{pixels:,}"
    most = f"{policy.max_pixels:,} (--media-max-pixels)"
    return RefusedError(f"it has {size} pixels, which is too large: at most {most} are taken")


def said_by_pillow(error: Image.DecompressionBombError) -> int | None:
    """The pixels of a picture that Pillow finds too large."""
    found = re.search(r"\((\d+) pixels\)", str(error))
    return None if found is None else int(found[1])


def _unread(data: bytes) -> str:
    """Why data is no picture that is read."""
    name = "empty" if not data else name_of(data) or "in no known format"
    *first, last = sorted(set(IMAGE_FORMATS) - {"DIB"})
    return f"it is {name}, not a picture that is read here: {', '.join(first)} or {last}"


def _check_png(data: bytes) -> None:
    """Raise RefusedError for a PNG that is cut off or damaged, which Pillow may not notice."""
    view = memoryview(data)
    at = _PNG_START
    while at + 8 <= len(view):
        length, kind = struct.unpack_from(">I4s", view, at)
        end = at + 8 + length
        if kind == b"IEND":
            return
        if end + 4 > len(view):
            break
        if kind == b"IDAT" and zlib.crc32(view[at + 4 : end]) != _LONG.unpack_from(view, end)[0]:
            raise RefusedError("its pixels are damaged (a checksum is wrong)")
        at = end + 4
    raise RefusedError("it is cut off")


def _tile_pixels(opened: Image.Image) -> int:
    """Of one tile of a TIFF, which is decoded whole, however little of it is shown."""
    if not isinstance(opened, TiffImagePlugin.TiffImageFile):
        return 0
    sides = [
        opened.tag_v2.get(tag) for tag in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH)
    ]
    width, height = (side if isinstance(side, int) else 0 for side in sides)
    return width * height


def _has_too_many_scans(data: bytes) -> bool:
    scans = 0
    at = 2
    while (marker := _MARKER.search(data, at)) is not None:
        kind = marker[0][1]
        if kind == 0xD9:  # what follows the end is not read
            return False
        if kind == 0xDA:
            scans += 1
            if scans > _MOST_SCANS:
                return True
        at = marker.end()
        at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return False

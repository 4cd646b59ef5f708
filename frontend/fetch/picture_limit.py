"""How many pixels a picture has, by its header, and whether it is one that takes hours."""

import re
from io import BytesIO
from typing import Final

from PIL import Image, TiffImagePlugin
from vllm.multimodal import image

from frontend.media_limits import FetchPolicy, RefusedError

_SIZE_UNKNOWN: Final = frozenset({"ICO"})
"""Formats with whole pictures inside, of a size that the header need not tell."""

_MOST_SCANS: Final = 100
"""Of a JPEG, libtiff's own limit. Each goes over all pixels, but takes a few bytes only."""

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
            pixels = max(opened.width * opened.height, _tile_pixels(opened))
            if opened.format in _SIZE_UNKNOWN:
                pixels = max(pixels, policy.max_pixels)
            if opened.format in ("JPEG", "MPO") and _has_too_many_scans(data):
                raise RefusedError(f"it has more than {_MOST_SCANS} scans")
    except OSError as error:
        raise ValueError(f"Failed to load image: {error}") from error  # in vLLM's words
    if pixels > policy.max_pixels:
        raise RefusedError(f"it has more than {policy.max_pixels} pixels, which is too large")
    return pixels


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

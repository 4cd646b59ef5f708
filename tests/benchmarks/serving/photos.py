"""The pictures of loads: JPEGs by their names."""

import base64
import io
import re
from functools import lru_cache
from typing import Final

from PIL import Image

from tests.benchmarks.fleet_traffic import PICTURE
from tests.pictures import random_of

KEPT: Final = 256
"""JPEGs that are kept, since a block asks about one several times."""

_UNIT: Final = 28
"""Pixels: patches of 14, and two by two of them are a token of the demo model."""

_SIZED = re.compile(rf"{PICTURE}(\d+)x(\d+):")


def picture(name: str, width: int = 0, height: int = 0) -> str:
    """How a load names a picture: with its size in pixels, unless it has that of the race."""
    return f"{PICTURE}{width}x{height}:{name}" if width else f"{PICTURE}{name}"


class Photos:
    """JPEGs by name.

    Args:
        side: in pixels, of those whose name has no size.
    """

    def __init__(self, side: int) -> None:
        self._side = side
        self.uri = lru_cache(KEPT)(self._uri)

    def size(self, name: str) -> tuple[int, int]:
        """Width and height in pixels."""
        match = _SIZED.match(name)
        return (int(match[1]), int(match[2])) if match else (self._side, self._side)

    def tokens(self, name: str) -> int:
        """In the demo model, which rounds the sides to whole tokens."""
        width, height = self.size(name)
        return round(width / _UNIT) * round(height / _UNIT)

    def _uri(self, name: str) -> str:
        coarse = random_of(name).integers(0, 256, (16, 16, 3), dtype="uint8")
        image = Image.fromarray(coarse).resize(self.size(name), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=85)
        return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()

"""Cut large pictures into strips: conversions then take little memory and hold the GIL briefly."""

from collections.abc import Iterator
from typing import Final

from PIL import Image

LARGE: Final = 4_000_000
"""Pixels of a picture that is converted strip by strip."""

_STRIP_PIXELS: Final = 1 << 16


def strips(picture: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield copies of full-width strips, each with its first row."""
    rows = max(1, _STRIP_PIXELS // picture.width)
    for top in range(0, picture.height, rows):
        yield top, picture.crop((0, top, picture.width, min(top + rows, picture.height)))


def is_large(picture: Image.Image) -> bool:
    return picture.width * picture.height > LARGE

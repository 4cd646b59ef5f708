"""Pillow's readers of WebP and AVIF, whose decoders keep what they made and copy it under the GIL.

Six WebP of 64 megapixels in a request of 0.9 MB stopped the event loop for 1.1 s. OpenCV decodes
large pictures to the same pixels, without the GIL.
"""

from io import SEEK_CUR, SEEK_END
from typing import IO, Any, Final

import cv2
import numpy as np
from PIL import AvifImagePlugin, Image, ImageFile, WebPImagePlugin

from common.media.avif_size import avif_pixels
from common.media.picture_metadata import MetadataError
from common.media.picture_strips import is_large

_READ: Final = {
    "L": (cv2.IMREAD_GRAYSCALE, "L"),
    "RGB": (cv2.IMREAD_COLOR, "BGR"),
    "RGBA": (cv2.IMREAD_UNCHANGED, "BGRA"),
}
"""How OpenCV decodes a picture of this mode, and what its pixels are to Pillow."""

MAX_WEBP_BYTES: Final = 64 << 20
"""Pillow copies the file thrice under the GIL whenever it opens it."""

_RIFF: Final = 12
_MAX_CHUNKS: Final = 1 << 16
"""Chunks of a WebP, frames among them: 56 MB of empty ones took 0.2 GB, and 0.4 s of the GIL."""

MAX_TRANSPARENT_AVIF: Final = 16 << 20
"""Pixels. Pillow copies 64 megapixels under the GIL in half a second."""


class WebP(WebPImagePlugin.WebPImageFile):
    """A WebP that drops its decoder, which keeps two frames, with the first frame."""

    def _open(self) -> None:
        assert self.fp is not None
        if self.fp.seek(0, SEEK_END) > MAX_WEBP_BYTES:
            raise ValueError("a WebP has 64 MiB at most: send a PNG or JPEG")
        self.fp.seek(_RIFF)
        for _ in range(_MAX_CHUNKS):
            if len(head := self.fp.read(8)) < 8:
                break
            size = int.from_bytes(head[4:], "little")
            self.fp.seek(size + size % 2, SEEK_CUR)
        else:
            raise MetadataError
        self.fp.seek(0)
        super()._open()

    def load(self) -> Any:
        if self._decoder is None:
            return ImageFile.ImageFile.load(self)
        return _decode_large(self) if is_large(self) else super().load()

    def _get_next(self) -> tuple[bytes, int, int]:
        first: tuple[bytes, int, int] = super()._get_next()
        self._decoder = None
        return first


class Avif(AvifImagePlugin.AvifImageFile):
    """An AVIF that drops its decoder, which keeps a frame, with the first frame."""

    def load(self) -> Any:
        if self._decoder is None:
            return ImageFile.ImageFile.load(self)
        if is_large(self) and self.mode != "RGBA":  # which takes OpenCV 30 bytes a pixel
            return _decode_large(self)
        if self.width * self.height > MAX_TRANSPARENT_AVIF:
            raise ValueError(
                "an AVIF with transparency has 16 megapixels at most: send a smaller one, or a WebP"
            )
        loaded = super().load()
        self._decoder = None
        return loaded


def open_avif(fp: IO[bytes], filename: str | bytes = "") -> ImageFile.ImageFile:
    """Open like Pillow, after checking the AV1 pictures against Pillow's size limit."""
    pixels = avif_pixels(fp.read())
    if Image.MAX_IMAGE_PIXELS is not None and pixels > 2 * Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(f"an AVIF with a picture of ({pixels} pixels)")
    fp.seek(0)
    return Avif(fp, filename)


def _decode_large(shown: WebP | Avif) -> Any:
    assert shown.fp is not None, "a picture is decoded once"
    shown._decoder, shown.tile = None, []
    shown.fp.seek(0)
    how, rawmode = _READ[shown.mode]
    encoded = np.frombuffer(shown.fp.read(), np.uint8)
    pixels = cv2.imdecode(encoded, how | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None or pixels.shape[1::-1] != shown.size or pixels[0, 0].size != len(rawmode):
        raise OSError(f"this large {shown.format} is damaged")
    decoded = Image.new(shown.mode, shown.size, None)
    decoded.frombytes(pixels, "raw", rawmode)
    shown.im = decoded.im
    return ImageFile.ImageFile.load(shown)

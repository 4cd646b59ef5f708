"""Decode what Pillow decodes in Python, pixel by pixel: QOI, PPM of other than 8 or 16 bits, and
compressed BMP.

Pillow takes up to 1.4 s of the GIL for a megapixel. NumPy, OpenCV and FFmpeg make the same pixels.
"""

import struct
from typing import Any, Final

import av
import cv2
import numpy as np
from PIL import BmpImagePlugin, ImageFile, PpmImagePlugin

_PIECE: Final = 1 << 16

_MAX_ODD_PIXELS: Final = 1 << 20
"""Pixels of a BMP with runs beyond the end of a row, which Pillow cuts off."""

_BMP_HEAD: Final = struct.Struct("<2sIIIIiiHHIIiiII")

_QOI_END: Final = bytes(7) + b"\1"
_MAX_TRAILER: Final = 64


class RefusedPlainText(PpmImagePlugin.PpmPlainDecoder):
    """Refuse a plain-text PPM, which takes Pillow a minute for 1 MB of comments."""

    def decode(self, buffer: object) -> tuple[int, int]:
        raise ValueError("PPM in plain text is not read; send the binary variant")


class Ppm(PpmImagePlugin.PpmDecoder):
    """Scale the numbers of a PPM by a table."""

    def decode(self, buffer: object) -> tuple[int, int]:
        assert self.fd is not None
        largest: int = self.args[-1]
        kind, most = (np.dtype("<u4"), 65_535) if self.mode == "I" else (np.dtype("u1"), 255)
        stored = np.dtype("u1" if largest < 256 else ">u2")
        scaled = np.rint(np.arange(1 << 8 * stored.itemsize) / largest * most)
        table = np.minimum(scaled, most).astype(kind)
        count = self.state.xsize * self.state.ysize * (3 if self.mode == "RGB" else 1)
        data = self.fd.read(count * stored.itemsize)
        numbers = np.frombuffer(data[: len(data) // stored.itemsize * stored.itemsize], stored)
        pixels = bytearray()
        for at in range(0, len(numbers), _PIECE):
            pixels += table[numbers[at : at + _PIECE]].tobytes()
        self.set_as_raw(pixels, "I;32" if self.mode == "I" else self.mode)
        return -1, 0


class BmpRuns(BmpImagePlugin.BmpRleDecoder):
    """Decode the runs of a BMP by OpenCV: 30 KB of 64 megapixels took Pillow 7 s of the GIL."""

    def decode(self, buffer: Any) -> tuple[int, int]:
        assert self.fd is not None
        at = self.fd.tell()
        _, of_four_bits, direction = self.args
        bits, kind = (4, 2) if of_four_bits else (8, 1)
        width, height = self.state.xsize, self.state.ysize
        begin = _BMP_HEAD.size + (4 << bits)
        head = _BMP_HEAD.pack(
            b"BM", 0, 0, begin, 40, width, height, 1, bits, kind, 0, 0, 0, 1 << bits, 0
        )
        greys = np.repeat(np.arange(1 << bits, dtype=np.uint8), 4).tobytes()  # each is its index
        data = np.frombuffer(head + greys + self.fd.read(), np.uint8)
        try:
            pixels = cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)
        except cv2.error:  # it says None, or this
            pixels = None
        if pixels is not None:
            rawmode = "L" if self.mode in ("1", "L") else "P"
            stored: Any = cv2.flip(pixels, 0).data
            self.set_as_raw(stored, rawmode, (0, direction))
        elif width * height > _MAX_ODD_PIXELS:
            raise ValueError("not enough image data")  # in Pillow's words
        else:
            self.fd.seek(at)
            return super().decode(buffer)
        return -1, 0


class Qoi(ImageFile.PyDecoder):
    """Decode a QOI by FFmpeg, which takes frames of at most 8K."""

    _pulls_fd = True

    def decode(self, buffer: object) -> tuple[int, int]:
        assert self.fd is not None
        self.fd.seek(0)
        data = self.fd.read()
        if _QOI_END not in data[-_MAX_TRAILER:]:  # FFmpeg would repeat the last pixel
            raise ValueError("not enough image data")  # in Pillow's words
        codec = av.VideoCodecContext.create("qoi", "r")
        codec.thread_count = 1
        packet = av.Packet(data)
        try:
            frames: list[Any] = codec.decode(packet)
        except av.error.FFmpegError as error:
            raise OSError("this QOI is damaged, or of more than 8K") from error
        self.set_as_raw(frames[0].to_ndarray().tobytes())
        return -1, 0

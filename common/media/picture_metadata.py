"""Limit the metadata that Pillow reads piece by piece, and unpacks to Python objects.

24 MB of comments in a GIF took 1.2 GB and 20 s, 24 MB of fractions in a PNG's EXIF 0.9 GB. Eight of
the latter with 12 MB, of one client, delayed another client's chats by 1.1 s (median).
"""

from functools import wraps
from io import BytesIO
from typing import IO, Final, Literal

import numpy as np
from PIL import Image, TiffImagePlugin, TiffTags
from vllm.multimodal import image
from vllm.multimodal.media import image as media_image

MAX_READS: Final = 1 << 19
"""Reads of a picture's file. 200 MB of pixels take a PNG 75,000 in chunks of 8 KiB, and a GIF of
8 MB of comments 65,000; other formats take fewer."""

MAX_NUMBERS: Final = 4 << 20
"""Bytes of numbers in the tags of a TIFF or of EXIF; Python needs up to 18 times as much. 64
megapixels in tiles of 16 x 16 have 4 MiB of offsets and lengths in a BigTIFF."""

_MAX_TAGS: Final = 1 << 16
"""Tags of a BigTIFF: there are no more numbers for them."""

_PLAIN: Final = {TiffTags.BYTE, TiffTags.ASCII, TiffTags.UNDEFINED}
"""Types of tags that remain bytes or a text."""

_FRACTIONS: Final = {TiffTags.RATIONAL, TiffTags.SIGNED_RATIONAL}
_FRACTION: Final = 16
"""Weight of a byte of a fraction, of which Pillow makes several objects."""

_OFFSETS: Final = (TiffImagePlugin.STRIPOFFSETS, TiffImagePlugin.TILEOFFSETS)
_LENGTHS: Final = (TiffImagePlugin.STRIPBYTECOUNTS, TiffImagePlugin.TILEBYTECOUNTS)
_LAYOUT: Final = (
    *_OFFSETS,
    *_LENGTHS,
    TiffImagePlugin.IMAGEWIDTH,
    TiffImagePlugin.IMAGELENGTH,
    TiffImagePlugin.BITSPERSAMPLE,
    TiffImagePlugin.COMPRESSION,
    TiffImagePlugin.SAMPLESPERPIXEL,
    TiffImagePlugin.ROWSPERSTRIP,
    TiffImagePlugin.PLANAR_CONFIGURATION,
    TiffImagePlugin.TILEWIDTH,
    TiffImagePlugin.TILELENGTH,
)
"""Tags of a TIFF that say how much libtiff decodes: sides, bits, compression, strips and tiles."""

_NUMBERS: Final = {
    TiffTags.SHORT: "u2",
    TiffTags.LONG: "u4",
    TiffTags.LONG8: "u8",
    TiffTags.SIGNED_SHORT: "u2",
    TiffTags.SIGNED_LONG: "u4",
    TiffTags.IFD: "u4",
}
"""How numbers of a type of tags are stored; any other is a byte."""

MAX_PLAIN_PARTS: Final = 1 << 16
"""Strips or tiles of a TIFF that is not compressed, each of which Pillow reads in Python."""

MAX_PACKED_BYTES: Final = 512 << 20
"""Bytes of all strips or tiles of a TIFF, twice the largest file. They may overlap: 5 MB of which
500,000 strips had a megabyte each took minutes."""

_VLLMS_OPEN: Final = image.open_image


class MetadataError(ValueError):
    """A picture's metadata would take too long to read, or too much memory."""

    def __init__(self, message: str = "it has too many pieces of metadata") -> None:
        super().__init__(message)


class _FewReads(BytesIO):
    """A file that can be read a limited number of times."""

    left = MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise MetadataError
        return super().read(size)


def limit_metadata() -> None:
    """Limit the pictures that vLLM and this package open in this process."""
    image.open_image = media_image.open_image = _open_image
    vars(TiffImagePlugin)["ImageFileDirectory_v2"] = _Tags


@wraps(_VLLMS_OPEN)
def _open_image(fp: BytesIO) -> Image.Image:
    return _VLLMS_OPEN(_FewReads(fp.getvalue()))


class _Tags(TiffImagePlugin.ImageFileDirectory_v2):
    """The tags of a TIFF, or of EXIF."""

    def load(self, fp: IO[bytes]) -> None:
        """Load like Pillow. Numbers beyond the limit are refused in a TIFF, and ignored in EXIF."""
        begin = fp.tell()
        layout = self._layout(fp)
        fp.seek(begin)
        super().load(fp)
        limited = self._tag_data_limit is not None  # only a TIFF's own tags are
        tags = self._tagdata
        left = MAX_NUMBERS
        for tag, data in list(tags.items()):
            if (kind := self.tagtype[tag]) in _PLAIN:
                continue
            numbers = len(data) * (_FRACTION if kind in _FRACTIONS else 1)
            if numbers <= left:
                left -= numbers
            elif limited:
                raise MetadataError
            else:
                del tags[tag]
        if limited:
            if len(set(layout)) < len(layout) or not set(layout) <= tags.keys():
                raise MetadataError("its TIFF tags are damaged: save it anew, or send PNG")
            self._check_parts(tags)

    def _layout(self, fp: IO[bytes]) -> list[int]:
        """Return the tags of the layout that are stored, of which libtiff may read others."""
        count, size = ("u8", "u8") if self._bigtiff else ("u2", "u4")
        row = np.dtype([("tag", "u2"), ("type", "u2"), ("count", size), ("data", size)])
        number = int.from_bytes(fp.read(int(count[1])), self._order())
        if number > _MAX_TAGS:
            raise MetadataError
        data = fp.read(number * row.itemsize)
        rows = np.frombuffer(data, row.newbyteorder(self._order()), len(data) // row.itemsize)
        found: list[int] = rows["tag"][np.isin(rows["tag"], _LAYOUT) & (rows["count"] > 0)].tolist()
        return found

    def _order(self) -> Literal["big", "little"]:
        return "big" if self.prefix == TiffImagePlugin.MM else "little"

    def _check_parts(self, tags: dict[int, bytes]) -> None:
        """Raise MetadataError if strips or tiles would take too long to decode."""
        plain = self.get(TiffImagePlugin.COMPRESSION, 1) == 1
        parts = [
            np.frombuffer(
                data, np.dtype(_NUMBERS.get(self.tagtype[tag], "u1")).newbyteorder(self._order())
            )
            for tag, data in tags.items()
            if tag in (_OFFSETS if plain else _LENGTHS)
        ]
        amounts = map(len, parts) if plain else (int(each.sum()) for each in parts)
        if sum(amounts) > (MAX_PLAIN_PARTS if plain else MAX_PACKED_BYTES):
            raise MetadataError("its strips or tiles are too many: save it anew, or send PNG")

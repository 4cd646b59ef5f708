"""Limit the metadata that Pillow reads piece by piece, and unpacks to Python objects.

24 MB of comments in a GIF took 1.2 GB and 20 s, 24 MB of fractions in a PNG's EXIF 0.9 GB. Eight of
the latter with 12 MB, of one client, delayed another client's chats by 1.1 s (median).
"""

from functools import wraps
from io import BytesIO
from typing import IO, Any, Final

from PIL import Image, TiffImagePlugin, TiffTags
from vllm.multimodal import image
from vllm.multimodal.media import image as media_image

MAX_READS: Final = 1 << 19
"""Reads of a picture's file. 200 MB of pixels take a PNG 75,000 in chunks of 8 KiB, and a GIF of
8 MB of comments 65,000; other formats take fewer, but for a compressed BMP."""

_READS_OF_A_RUN: Final = 2
_MAX_RUNS: Final = 4 << 20
"""Runs of a BMP, of a pixel each at least, which Pillow reads in Python."""

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

_VLLMS_OPEN: Final = image.open_image
_DIRECTORY: Final[Any] = TiffImagePlugin.ImageFileDirectory_v2
_PILLOWS_LOAD: Final = _DIRECTORY.load


class MetadataError(ValueError):
    """A picture's metadata would take too long to read, or too much memory."""

    def __init__(self) -> None:
        super().__init__("it has too many pieces of metadata")


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
    _DIRECTORY.load = _load_tags


@wraps(_VLLMS_OPEN)
def _open_image(fp: BytesIO) -> Image.Image:
    file = _FewReads(fp.getvalue())
    opened = _VLLMS_OPEN(file)
    if opened.format in ("BMP", "DIB"):
        file.left += _READS_OF_A_RUN * min(opened.width * opened.height, _MAX_RUNS)
    return opened


def _load_tags(tags: Any, fp: IO[bytes]) -> None:
    """Load like Pillow. Numbers beyond the limit are refused in a TIFF, and ignored in EXIF."""
    if tags._bigtiff:
        begin = fp.tell()
        if int.from_bytes(fp.read(8), "big" if tags._endian == ">" else "little") > _MAX_TAGS:
            raise MetadataError
        fp.seek(begin)
    _PILLOWS_LOAD(tags, fp)
    left = MAX_NUMBERS
    for tag, data in list(tags._tagdata.items()):
        if (kind := tags.tagtype[tag]) in _PLAIN:
            continue
        numbers = len(data) * (_FRACTION if kind in _FRACTIONS else 1)
        if numbers <= left:
            left -= numbers
            continue
        if tags._tag_data_limit is not None:  # only a TIFF's own tags have one
            raise MetadataError
        del tags._tagdata[tag]

"""A real process for media whose decoders take more and more memory, for pictures of one size.

Forked in the place of ``frontend.processing.child``.
"""

from typing import Any, Final

from PIL import Image

from frontend.fetch.decoders import decode
from frontend.processing import child

GREEDY: Final = (64, 32)
"""Size of pictures that never stop growing."""

LEAKING: Final = (32, 64)
"""Size of pictures that leave as much behind as any may have."""

_kept: Final[list[bytearray]] = []
_decode: Final = decode


def _grow(*args: Any) -> Any:
    decoded = _decode(*args)
    picture: Image.Image = decoded.media
    pieces: list[bytearray] = []
    while picture.size == GREEDY:
        pieces.append(bytearray(64 << 20))
    if picture.size == LEAKING:
        _kept.append(bytearray(child.ANY_MEDIUM_BYTES - (64 << 20)))
        _kept.append(bytearray(64 << 20))
    return decoded


setattr(child, decode.__name__, _grow)
main = child.main

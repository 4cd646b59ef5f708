"""AVIF is decoded, and costs no more than the AV1 pictures inside say."""

import io
import struct

import pytest
from PIL import Image, features
from vllm.multimodal.media import ImageMediaIO, MediaWithBytes

from common.media.avif_size import (
    MAX_FRAMES,
    MAX_PARTS,
    MAX_UNITS,
    UnreadAvifError,
    avif_pixels,
)
from common.media.formats import AVIF, IMAGE_FORMATS
from frontend.fetch.content import Content
from frontend.fetch.decoders import decode, limit_decoders
from frontend.fetch.picture_limit import picture_pixels
from frontend.media_limits.policy import FetchPolicy, RefusedError

pytestmark = pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")

SIDE = 64


def avif(mode: str = "RGB", size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    buffer = io.BytesIO()
    picture = Image.new(mode, size, "red" if mode != "L" else 200)
    picture.save(buffer, AVIF, codec="aom", speed=10, max_threads=1)
    return buffer.getvalue()


def lying(data: bytes, side: int = 8) -> bytes:
    """An AVIF whose container says that its picture is small."""
    at = data.index(b"ispe") + 8
    return data[:at] + struct.pack(">II", side, side) + data[at + 8 :]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_a_picture_is_decoded(mode: str) -> None:
    admitted: list[int] = []
    policy = FetchPolicy()
    limit_decoders(policy)
    decoded = decode(Content.of(avif(mode)), ImageMediaIO(), policy, admitted.append)
    assert AVIF in IMAGE_FORMATS
    assert isinstance(decoded, MediaWithBytes) and decoded.media.size == (SIDE, SIDE)
    red, green, blue = decoded.media.getpixel((9, 9))
    assert red > 190 and (mode == "L" or max(green, blue) < 60)
    assert admitted == [SIDE * SIDE]


def test_a_picture_larger_than_its_container_says() -> None:
    """16 pixels a side by its header; the decoder would have made as many as AV1 has."""
    policy = FetchPolicy(max_pixels=SIDE * SIDE - 1)
    limit_decoders(policy)
    for data in (avif(), lying(avif())):
        with pytest.raises((RefusedError, Image.DecompressionBombError), match=r"4,?096 pixels"):
            picture_pixels(data, policy)
        with pytest.raises(RefusedError, match="4,096 pixels, which is too large"):
            decode(Content.of(data), ImageMediaIO(), policy, lambda _: None)
    assert avif_pixels(lying(avif())) == SIDE * SIDE


def test_whoever_opens_one_is_kept_to_the_limit() -> None:
    """As a model's own code does, which knows no policy."""
    limit_decoders(FetchPolicy(max_pixels=SIDE * SIDE // 2))
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(lying(avif())))


def test_an_animation_is_refused_in_words() -> None:
    buffer = io.BytesIO()
    pages = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    options = {"codec": "aom", "speed": 10, "max_threads": 1}
    pages[0].save(buffer, AVIF, save_all=True, append_images=pages[1:], **options)
    with pytest.raises(RefusedError, match="animated AVIF"):
        picture_pixels(buffer.getvalue(), FetchPolicy())


def test_items_that_repeat_the_file_are_refused() -> None:
    """Each item may have many pieces, and a decoder would put them together."""
    data = avif()
    pieces = 4000
    for items, length in ((1, len(data)), (MAX_PARTS // pieces + 1, 1)):
        item = struct.pack(">HH", 0, pieces) + struct.pack(">II", 0, length) * pieces
        item = b"".join(struct.pack(">H", number + 1) + item for number in range(items))
        changed = with_places(data, struct.pack(">H", items) + item)
        with pytest.raises(UnreadAvifError, match="of a kind that is not read here"):
            avif_pixels(changed)


def with_places(data: bytes, items: bytes) -> bytes:
    """Return an AVIF with other places of its items, whose numbers have four bytes."""
    at = data.index(b"iloc")
    size = struct.unpack_from(">I", data, at - 4)[0]
    iloc = bytes(4) + b"\x44\x00" + items
    box = struct.pack(">I4s", 8 + len(iloc), b"iloc") + iloc
    meta = data.index(b"meta") - 4
    length = struct.unpack_from(">I", data, meta)[0] + len(box) - size
    changed = data[: at - 4] + box + data[at - 4 + size :]
    return changed[:meta] + struct.pack(">I", length) + changed[meta + 4 :]


def test_parts_that_take_memory_are_counted() -> None:
    """Each box is remembered: 200 MB of empty ones took 3.4 GB, and held the GIL for 2 s. A frame
    that is not shown is decoded all the same."""
    data = avif()
    box = struct.pack(">I4s", 8, b"free")
    assert avif_pixels(data + 1000 * box) == SIDE * SIDE
    drawn = data[data.index(b"\x12\0\x0a") :]
    frame = drawn[drawn.index(b"\x32") :]
    bombs = [data + (MAX_PARTS + 1) * box]
    for units in (drawn, drawn + MAX_FRAMES * frame, MAX_UNITS * drawn[:2] + drawn):
        whole = data
        for _ in range(2):  # the place of what follows is known then
            place = struct.pack(">HHHHII", 1, 1, 0, 1, len(whole) + 8, len(units))
            whole = with_places(data, place)
        bombs.append(whole + struct.pack(">I4s", 8 + len(units), b"mdat") + units)
    assert avif_pixels(bombs.pop(1)) == SIDE * SIDE
    for bomb in bombs:
        with pytest.raises(UnreadAvifError, match="of a kind that is not read here"):
            avif_pixels(bomb)


def test_every_damage_is_the_users_error() -> None:
    data = avif("RGBA")
    policy = FetchPolicy()
    limit_decoders(policy)
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + b"\xff" + data[at + 1 :]):
            try:
                decode(Content.of(damaged), ImageMediaIO(), policy, lambda _: None)
            except (RefusedError, ValueError):
                continue

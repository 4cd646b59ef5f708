"""Decoding what may be a bomb, broken, or made up to lead decoders astray."""

import contextlib
import io
import random
import resource
import struct
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import (
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageCms,
    ImageFile,
    PngImagePlugin,
    TiffTags,
)
from PIL.AvifImagePlugin import AvifImageFile
from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    COMPRESSION,
    IMAGELENGTH,
    IMAGEWIDTH,
    PHOTOMETRIC_INTERPRETATION,
    ROWSPERSTRIP,
    SAMPLESPERPIXEL,
    STRIPBYTECOUNTS,
    STRIPOFFSETS,
    TILEBYTECOUNTS,
    TILELENGTH,
    TILEOFFSETS,
    TILEWIDTH,
    X_RESOLUTION,
)
from PIL.WebPImagePlugin import WebPImageFile
from vllm import envs
from vllm.multimodal.image import convert_image_mode
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO
from vllm.multimodal.media.audio import load_audio

from common.media import webp_and_avif
from common.media.formats import IMAGE_FORMATS
from common.media.picture_metadata import (
    MAX_NUMBERS,
    MAX_PACKED_BYTES,
    MAX_PLAIN_PARTS,
    MAX_READS,
)
from frontend.fetch import decoders, format_probe
from frontend.fetch.content import Content, decoding_mode
from frontend.fetch.data_url import read_data_url
from frontend.fetch.decoders import SpeechIO, decode, limit_decoders
from frontend.fetch.picture_limit import picture_pixels
from frontend.fetch.video_limit import count_frames
from frontend.media_limits.policy import FetchPolicy, MediaError, RefusedError
from tests import odd_headers
from tests.clips import AV1, floats
from tests.e2e.processes import run_python
from tests.fakes.budget import anything
from tests.pictures import blank_picture, picture
from tests.unit.frontend.fetch.videos import (
    encoded_film,
    jpeg,
    jpeg_sequence,
    uncounted,
    video,
)


@pytest.fixture(autouse=True)
def limits_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_MAX_IMAGE_PIXELS", envs.VLLM_MAX_IMAGE_PIXELS, raising=False)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)


def limited(**limits: object) -> FetchPolicy:
    policy = FetchPolicy.model_validate(limits)
    limit_decoders(policy)
    return policy


def decoded(data: bytes, policy: FetchPolicy, media_io: MediaIO[object] | None = None) -> object:
    return decode(Content.of(data), media_io or ImageMediaIO(), policy, anything)


class TooMuch(Exception):
    """A budget has no room."""


def at_most(most: int) -> Callable[[int], None]:
    """Return what admits so many pixels."""

    def admit(pixels: int) -> None:
        if pixels > most:
            raise TooMuch

    return admit


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[object, ...]]:
    """Arguments of each call of a method from now on."""
    original = getattr(owner, name)
    calls: list[tuple[object, ...]] = []

    def noted(self: object, *args: object, **kwargs: object) -> object:
        calls.append(args)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, noted)
    return calls


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = blank_picture(20_000)
    unpacked = calls_of(monkeypatch, ImageFile.ImageFile, "load")
    with pytest.raises(RefusedError, match=r"400,000,000 pixels.* at most 67,108,864 "):
        decoded(bomb, limited())
    assert not unpacked


def test_the_limit_is_the_operators() -> None:
    policy = limited(max_pixels=100 * 100)
    with pytest.raises(RefusedError, match=r"10,100 pixels.* at most 10,000 "):
        decoded(picture("x", (101, 100)), policy)
    assert decoded(picture("x", (100, 100)), policy)


def test_a_bomb_inside_an_icon() -> None:
    """Whose own header says 16 by 16."""
    bomb = blank_picture(2000)
    icon = struct.pack("<HHH", 0, 1, 1)
    icon += struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(bomb), 22) + bomb
    with pytest.raises(RefusedError, match="pixels"):
        decoded(icon, limited(max_pixels=1_000_000))


def test_a_header_that_takes_minutes_to_read() -> None:
    """Pillow reads its pieces one by one, and puts EXIF together in quadratic time."""
    policy = limited()
    whole = jpeg(16, 16)
    exif = b"\xff\xe1\x00\x09Exif\0\0x"
    hidden = b"\xff\xf0\xff\xff" + 5_000 * exif  # Pillow does not skip such a segment
    note = b"\xff\xfe\x00\x02"
    scan = whole.index(b"\xff\xda") + 14
    chunk, pixels = (struct.pack(">I4sI", 0, kind, zlib.crc32(kind)) for kind in (b"teSt", b"IDAT"))
    drawn = picture("x")
    tags = struct.pack("<4sHHQQ", b"II+\0", 8, 0, 16, 1 << 20) + bytes(100)
    still = io.BytesIO()
    Image.new("L", (16, 16)).save(still, "GIF")
    moving = still.getvalue()
    Image.new("L", (16, 16)).save(still := io.BytesIO(), "WEBP")
    web = still.getvalue()
    head = 13 + 3 * (2 << (moving[10] & 7))
    for bomb in (
        whole[:2] + 70 * exif + whole[2:],
        whole[:2] + hidden + whole[2:],
        whole[:2] + 5_000 * note + whole[2:],
        whole[:scan] + 5_000 * b"\xff\x02\0\2" + whole[scan:],
        drawn[:33] + 300_000 * chunk + drawn[33:],
        drawn[:33] + 300_000 * pixels + drawn[33:],
        tags,
        web[:4] + struct.pack("<I", len(web) - 8 + (1 << 19)) + web[8:] + bytes(1 << 19),
        moving[:head] + b"!\xfe" + 300_000 * b"\x02ab" + b"\0" + moving[head:],
        moving[:head] + MAX_READS * b"\0" + moving[head:],
        b"P5\n#" + MAX_READS * b" " + b"\n16 16\n255\n" + bytes(256),
        tiff(BITSPERSAMPLE, TiffTags.SHORT, MAX_NUMBERS + 2),
        tiff(X_RESOLUTION, TiffTags.RATIONAL, 1 << 20),
    ):
        with pytest.raises(RefusedError, match="too many pieces of metadata"):
            decoded(bomb, policy)
    for good in (
        whole[:2] + 20 * exif + 500 * note + whole[2:] + 5_000 * note,
        drawn[:33] + 1_000 * chunk + drawn[33:],
        moving[:head] + b"!\xfe" + 30_000 * b"\x02ab" + b"\0" + moving[head:],
        tiff(ExifTags.Base.ImageDescription, TiffTags.ASCII, 2 * MAX_NUMBERS),
    ):
        assert decoded(good, policy)


def test_pictures_that_pillow_decodes_in_python() -> None:
    """They are read piece by piece, and are no metadata. A QOI of a megapixel was refused."""
    policy = limited()

    def pixels(data: bytes) -> np.ndarray:
        loaded: Any = decoded(data, policy)
        return np.asarray(loaded.media)

    side = 800
    ramp = np.add.outer(np.arange(side), np.arange(side))[..., None] * [1, 2, 3] % 251
    shown = ramp.astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(shown).save(buffer, "QOI")
    assert np.array_equal(pixels(buffer.getvalue()), shown)
    with pytest.raises(ValueError, match="not enough image data"):
        decoded(buffer.getvalue()[:-9], policy)
    for largest in (100, 1_000, 65_535):
        kind = "u1" if largest < 256 else ">u2"
        stored = (ramp * largest // 255).astype(kind)
        scaled = np.rint(stored / largest * 255).astype(np.uint8)
        head = f"P6 {side} {side} {largest}\n".encode()
        assert np.array_equal(pixels(head + stored.tobytes()), scaled)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_runs_of_a_bmp(bits: int) -> None:
    """Pillow takes the GIL for 7 s for the ends of 8,192 lines of 30 KB."""
    policy = limited()
    Image.register_decoder("slow", BmpImagePlugin.BmpRleDecoder)
    row = b"\5\x11\0\3\x12\x30" + (b"\2\0" if bits == 8 else b"")  # a run, and single pixels
    lines = {
        "plain": row + b"\0\0",
        "short": b"\5\x11\0\0",
        "long": row + b"\xff\x12\0\0",
        "moved": b"\3\x11\0\2\3\0\2\x13\0\0",
    }
    for name, line in lines.items():
        for mark in (1, 255):  # greys, or colours
            data = runs(8, 6, bits, 6 * line + b"\0\1", mark)
            loaded: Any = decoded(data, policy)
            plain = Image.open(io.BytesIO(data))
            plain.tile = [plain.tile[0]._replace(codec_name="slow")]
            assert loaded.media.tobytes() == plain.convert("RGB").tobytes(), name
    assert decoded(runs(4000, 2000, bits, 2000 * b"\1\1\0\0" + b"\0\1", 1), policy)
    with pytest.raises(ValueError, match="not enough image data"):
        decoded(runs(4000, 2000, bits, 1000 * row, 1), policy)


def runs(width: int, height: int, bits: int, data: bytes, mark: int) -> bytes:
    """Return a BMP of runs whose palette is grey, if ``mark`` is 1."""
    palette = b"".join(bytes([index, index * mark % 256, index, 0]) for index in range(1 << bits))
    begin = 54 + len(palette)
    size = struct.pack("<IiiHHI", 40, width, height, 1, bits, 1 if bits == 8 else 2)
    head = b"BM" + struct.pack("<III", begin + len(data), 0, begin) + size + bytes(20)
    return head + palette + data


def tiff(tag: int, kind: int, size: int) -> bytes:
    """A grey picture with a tag of many bytes."""
    buffer = io.BytesIO()
    Image.new("L", (16, 16)).save(buffer, "TIFF", tiffinfo={})
    plain = buffer.getvalue()
    (begin,) = struct.unpack_from("<L", plain, 4)
    (number,) = struct.unpack_from("<H", plain, begin)
    rows = [plain[at : at + 12] for at in range(begin + 2, begin + 2 + 12 * number, 12)]
    rows = [row for row in rows if struct.unpack_from("<H", row)[0] != tag]
    count = size // {TiffTags.ASCII: 1, TiffTags.SHORT: 2, TiffTags.RATIONAL: 8}[kind]
    rows.append(struct.pack("<HHLL", tag, kind, count, len(plain)))
    rows.sort(key=lambda row: struct.unpack_from("<H", row)[0])
    tags = struct.pack("<H", len(rows)) + b"".join(rows) + bytes(4)
    moved = plain[:4] + struct.pack("<L", len(plain) + size) + plain[8:]
    return moved + size * b"\1" + tags


def test_numbers_of_exif_that_take_memory_are_left_out() -> None:
    """Pillow made 0.9 GB of 24 MB of fractions in a PNG's EXIF, to look for its orientation."""
    policy = limited()
    drawn = picture("x")
    fractions, orientation = (X_RESOLUTION, TiffTags.RATIONAL), ExifTags.Base.Orientation
    size = 1 << 20
    for tags in (
        struct.pack("<HHLL", orientation, TiffTags.RATIONAL, size // 8, 26),
        struct.pack("<HHLHH", orientation, TiffTags.SHORT, 1, 6, 0)
        + struct.pack("<HHLL", *fractions, size // 8, 38),
    ):
        exif = struct.pack("<2sHLH", b"II", 42, 8, len(tags) // 12) + tags + bytes(4)
        exif += size * b"\1"
        chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif
        chunk += struct.pack(">I", zlib.crc32(chunk[4:]))
        tracemalloc.start()
        try:
            shown: Any = decoded(drawn[:33] + chunk + drawn[33:], policy)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()
        plain: Any = decoded(drawn, policy)
        turned = len(tags) > 12
        expected = plain.media.transpose(Image.Transpose.ROTATE_270) if turned else plain.media
        assert shown.media.tobytes() == expected.tobytes()


@pytest.mark.parametrize("format_", [each for each in ("WEBP", "AVIF") if each in IMAGE_FORMATS])
def test_a_picture_drops_its_decoder(format_: str) -> None:
    """That of WebP keeps two frames, twice the picture, for which no budget has room."""
    shown: Any = decoded(format_probe._picture(format_), limited())
    shown = shown.media
    assert shown._decoder is None
    assert shown.copy().size == shown.size


@pytest.mark.parametrize(
    ("format_", "mode"),
    [
        each
        for each in (("WEBP", "RGB"), ("WEBP", "RGBA"), ("AVIF", "RGB"), ("AVIF", "L"))
        if each[0] in IMAGE_FORMATS
    ],
)
def test_a_large_picture_is_decoded_to_the_same_pixels(
    format_: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By OpenCV, since Pillow's decoders copy it under the GIL: 0.5 s for 64 megapixels of WebP."""
    noise = np.random.default_rng(1).integers(0, 256, (31, 45, len(mode)), np.uint8)
    buffer = io.BytesIO()
    turned = b"Exif\0\0MM\0*" + struct.pack(">LHHHLHHL", 8, 1, 274, 3, 1, 6, 0, 0)
    Image.fromarray(noise.squeeze()).save(buffer, format_, exif=turned)
    small: Any = decoded(buffer.getvalue(), limited())
    monkeypatch.setattr(webp_and_avif, "is_large", lambda _: True)
    monkeypatch.setattr(WebPImageFile, "_get_next", None)
    monkeypatch.setattr(AvifImageFile, "load", None)
    large: Any = decoded(buffer.getvalue(), limited())
    assert (large.media.mode, large.media.size) == (small.media.mode, small.media.size)
    assert large.media.tobytes() == small.media.tobytes()


@pytest.mark.skipif("AVIF" not in IMAGE_FORMATS, reason="Pillow has no AVIF")
def test_a_large_avif_with_transparency_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webp_and_avif, "MAX_TRANSPARENT_AVIF", 15)
    buffer = io.BytesIO()
    Image.new("RGBA", (4, 4)).save(buffer, "AVIF", speed=10)
    with pytest.raises(ValueError, match="16 megapixels at most"):
        decoded(buffer.getvalue(), limited())


def test_a_large_picture_in_lab_is_converted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow prepares each conversion: that of 1,000 strips took 14 s, of the whole picture 2."""
    prepared: list[object] = []
    build = ImageCms.buildTransform

    def counted(*args: Any) -> Any:
        prepared.append(args)
        return build(*args)

    monkeypatch.setattr(ImageCms, "buildTransform", counted)
    buffer = io.BytesIO()
    Image.new("LAB", (2001, 2000), (90, 140, 90)).save(buffer, "TIFF")
    assert decoded(buffer.getvalue(), limited())
    assert len(prepared) == 1


def test_a_webp_of_more_bytes_than_pillow_may_copy() -> None:
    """Pillow copies it under the GIL: 200 MB behind a picture stopped the event loop for 1.5 s."""
    padded = format_probe._picture("WEBP") + bytes(webp_and_avif.MAX_WEBP_BYTES)
    with pytest.raises(ValueError, match="64 MiB at most"):
        decoded(padded, limited())


def test_pillows_warnings_about_a_picture_are_not_kept() -> None:
    """Each has a text of its own, and Python keeps and prints all of them."""
    policy = limited()
    entries = b"".join(struct.pack("<HHII", 40_000 + n, 7, n + 5, 1 << 20) for n in range(500))
    exif = b"II*\0\x08\0\0\0" + struct.pack("<H", 500) + entries + bytes(4)
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG", exif=exif)
    with warnings.catch_warnings(record=True) as shown:
        limit_decoders(policy)
        assert decoded(buffer.getvalue(), policy)
    assert not shown


def test_a_film_of_more_than_8k_is_refused(tmp_path: Path) -> None:
    policy = limited()
    film_io = VideoMediaIO(ImageMediaIO())
    assert decoded(video(tmp_path, 1, 7680, 4320), policy, film_io)
    with pytest.raises(RefusedError, match="at most 35,389,440 pixels"):
        decoded(video(tmp_path, 1, 8192, 4400), policy, film_io)


@pytest.mark.parametrize("sampler", ["molmo2", "glm46v", "glm5next", "opencv"])
def test_a_film_that_claims_a_billion_frames(sampler: str) -> None:
    """vLLM looks for the end of the film, and believes the header if it finds no frame."""
    policy = limited()
    film = encoded_film("matroska", "mjpeg", pixels="yuvj420p").replace(b"\xff\xc0", bytes(2))
    at = film.index(b"\x44\x89\x88") + 3  # the duration
    claiming = film[:at] + struct.pack(">d", 4e10) + film[at + 8 :]
    with pytest.raises(RefusedError, match="1,000,000,000 frames: at most 4,194,304 are taken"):
        decoded(claiming, policy, VideoMediaIO(ImageMediaIO(), video_backend=sampler))


@pytest.mark.parametrize("sampler", ["opencv_dynamic", "glm5next", "glmga"])
def test_a_film_too_short_for_its_sampler(sampler: str) -> None:
    film = encoded_film("matroska", "mjpeg", pixels="yuvj420p", frames=2)
    with pytest.raises(RefusedError, match="looks at none of its 2 frames: it is too short"):
        decoded(film, limited(), VideoMediaIO(ImageMediaIO(), video_backend=sampler))


def test_the_colours_of_an_hdr_film_count_before_they_are_mapped() -> None:
    colours = {"x264-params": "colormatrix=bt2020nc:colorprim=bt2020:transfer=smpte2084"}
    hdr = made("libx264", 4, options=colours)
    with pytest.raises(TooMuch):
        decode(Content.of(hdr), VideoMediaIO(ImageMediaIO()), limited(), at_most(100_000_000))


def test_a_film_of_one_frame_of_which_a_sampler_wants_an_even_number() -> None:
    """It divides by zero."""
    film = encoded_film("matroska", "mjpeg", pixels="yuvj420p", frames=1)
    with pytest.raises(RefusedError, match="looks at none of its 1 frames: it is too short"):
        decoded(film, limited(), VideoMediaIO(ImageMediaIO(), video_backend="qwen2_vl"))


def test_a_bomb_of_text() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("x", "x" * 50_000_000, zip=True)
    buffer = io.BytesIO()
    Image.new("L", (1, 1)).save(buffer, "PNG", pnginfo=info)
    assert len(buffer.getvalue()) < 100_000
    with pytest.raises(RefusedError, match="its text or colour profile is too large"):
        decoded(buffer.getvalue(), limited())


@pytest.mark.parametrize("format_", ["PNG", "WEBP"])
def test_a_picture_without_its_end_is_called_so(format_: str) -> None:
    cut = format_probe._picture(format_)[:12]
    with pytest.raises(RefusedError, match=rf"(?i)it begins as {format_}, but is cut off"):
        decoded(cut, limited())


def grey_tiff(data: bytes, tags: dict[int, list[int]]) -> bytes:
    """Return a deflated TIFF of 10 x 10, unless ``tags`` say otherwise, whose data begin at 8."""
    tags = {
        IMAGEWIDTH: [10],
        IMAGELENGTH: [10],
        BITSPERSAMPLE: [8],
        COMPRESSION: [8],
        PHOTOMETRIC_INTERPRETATION: [1],
        SAMPLESPERPIXEL: [1],
    } | tags
    begin = 8 + len(data)
    rows, behind = b"", b""
    for tag, values in sorted(tags.items()):
        numbers = struct.pack(f"<{len(values)}I", *values)
        if len(values) > 1:
            at = struct.pack("<I", begin + 6 + 12 * len(tags) + len(behind))
            numbers, behind = at, behind + numbers
        rows += struct.pack("<HHI", tag, TiffTags.LONG, len(values)) + numbers
    head = struct.pack("<2sHI", b"II", 42, begin)
    return head + data + struct.pack("<H", len(tags)) + rows + bytes(4) + behind


def test_a_tile_larger_than_its_picture() -> None:
    """It is decoded whole: 4 MB of a TIFF of 10x10 pixels took a gigabyte."""
    side = 1024
    tile = zlib.compress(bytes(side * side))
    tall = {TILELENGTH: [side], TILEOFFSETS: [8], TILEBYTECOUNTS: [len(tile)]}
    alone = grey_tiff(tile, {TILEWIDTH: [side], **tall})
    assert picture_pixels(alone, FetchPolicy()) == side * side
    with pytest.raises(RefusedError, match="at most 1,000,000 "):
        decoded(alone, limited(max_pixels=1_000_000))
    # Several may be the same, and hardly be seen: 70 KB of 1,024 large ones took a minute.
    many = {IMAGEWIDTH: [side + 1], IMAGELENGTH: [5 * side + 1], TILEWIDTH: [side], **tall}
    many |= {TILEOFFSETS: [8] * 12, TILEBYTECOUNTS: [len(tile)] * 12}
    assert picture_pixels(grey_tiff(tile, many), limited()) == 6 * side * side
    with pytest.raises(RefusedError, match="it has 6,291,456 pixels"):
        decoded(grey_tiff(tile, many), limited(max_pixels=6_000_000))


def test_a_damaged_fax_fills_no_log(capfd: pytest.CaptureFixture[str]) -> None:
    """libtiff wrote a line for each row: 93 MB for a megabyte."""
    fax = {BITSPERSAMPLE: [1], COMPRESSION: [3], IMAGELENGTH: [999], STRIPOFFSETS: [8]}
    data = b"\0\x10\2" * 999
    assert decoded(grey_tiff(data, fax | {STRIPBYTECOUNTS: [len(data)]}), limited())
    assert "Fax" not in capfd.readouterr().err


def test_a_damaged_tiff_is_not_black() -> None:
    """Pillow says so once, and vLLM did not listen."""
    data = zlib.compress(bytes(range(100)))
    tags = {STRIPOFFSETS: [8], STRIPBYTECOUNTS: [len(data)]}
    assert decoded(grey_tiff(data, tags), limited())
    with pytest.raises(RefusedError, match="it is damaged, or too short"):
        decoded(grey_tiff(data, tags | {STRIPBYTECOUNTS: [9]}), limited())


def test_strips_that_overlap() -> None:
    """libtiff unpacks each whole: 5 MB took hours, in a call that nothing ends."""
    policy = limited()
    strip = zlib.compress(bytes(16))
    rows = 1000
    tags = {IMAGELENGTH: [rows], ROWSPERSTRIP: [1], STRIPOFFSETS: [8] * rows}
    lengths = {STRIPBYTECOUNTS: [len(strip)] * rows}
    assert decoded(grey_tiff(strip, tags | lengths), policy)
    for bomb in (
        tags | {STRIPBYTECOUNTS: [MAX_PACKED_BYTES // rows + 1] * rows},
        tags | {COMPRESSION: [1], STRIPOFFSETS: [8] * (MAX_PLAIN_PARTS + 1)},
    ):
        with pytest.raises(RefusedError, match="strips or tiles are too many"):
            decoded(grey_tiff(strip, bomb), policy)


@pytest.mark.parametrize("kind", [17, 99])
def test_tags_that_only_libtiff_reads(kind: int) -> None:
    """Or of which it reads the first, and Pillow the second."""
    policy = limited()
    tile = zlib.compress(bytes(256))
    tags = {TILEWIDTH: [16], TILELENGTH: [16], TILEOFFSETS: [8], TILEBYTECOUNTS: [len(tile)]}
    whole = grey_tiff(tile, tags)
    at = whole.index(struct.pack("<HH", TILEWIDTH, TiffTags.LONG))
    odd = struct.pack("<HHII", TILEWIDTH, kind, 1, 16)
    begin = int.from_bytes(whole[4:8], "little")
    number = int.from_bytes(whole[begin : begin + 2], "little")
    twice = whole[:begin] + struct.pack("<H", number + 1) + whole[begin + 2 : at] + odd + whole[at:]
    for bad in (whole[:at] + odd + whole[at + 12 :], twice):
        with pytest.raises(RefusedError, match="its TIFF tags are damaged: save it anew"):
            decoded(bad, policy)
    assert decoded(whole, policy)


def test_pictures_that_may_be_larger_than_they_say() -> None:
    """Their headers said 10x10, while the stream behind was decoded with 64 megapixels."""
    buffer = io.BytesIO()
    Image.new("RGB", (10, 10)).save(buffer, "JPEG2000")
    admitted: list[int] = []
    policy = limited()
    with pytest.raises(RefusedError, match="it is JPEG 2000, which is not read here: send JPEG"):
        decode(Content.of(buffer.getvalue()), ImageMediaIO(), policy, admitted.append)
    assert not admitted


def test_a_jpeg_of_many_scans() -> None:
    """Each goes over all pixels: 230 KB took a minute."""
    with io.BytesIO() as buffer:
        Image.new("L", (64, 64), 128).save(buffer, "JPEG", progressive=True)
        whole = buffer.getvalue()
    last_scan = whole[whole.rindex(b"\xff\xda") : -2]
    policy = limited()
    many = whole[:-2] + 100 * last_scan + whole[-2:]
    with pytest.raises(RefusedError, match="scans"):
        decoded(many, policy)
    # What looks like scans in its comments, or follows its end, as films do, is none.
    comment = b"\xff\xfe" + struct.pack(">H", 2 + 600) + 300 * b"\xff\xda"
    decoded(whole[:2] + comment + whole[2:] + 300 * b"\xff\xda", policy)


def test_a_picture_in_plain_text() -> None:
    """A megabyte of comments took a minute."""
    policy = limited()
    with pytest.raises(ValueError, match="plain text is not read"):
        decoded(b"P2\n2 2\n255\n0 1 2 3\n", policy)
    decoded(b"P5\n2 2\n255\n\0\1\2\3", policy)


def test_an_animation_costs_its_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing counts or decodes the rest: here 2,000 frames of a megapixel."""
    buffer = io.BytesIO()
    first, second = (Image.new("P", (1000, 1000), color) for color in (1, 0))
    first.save(buffer, "GIF", save_all=True, append_images=[second])
    data = buffer.getvalue()
    frame = data[data.rindex(b"\x21\xf9") : -1]
    data = data[:-1] + frame * 2_000 + b"\x3b"
    sought = calls_of(monkeypatch, GifImagePlugin.GifImageFile, "_seek")
    image = decoded(data, limited())
    assert {args[0] for args in sought} == {0}
    assert isinstance(image.media, Image.Image)  # type: ignore[attr-defined]


def test_a_video_is_decoded_as_by_vllm(tmp_path: Path) -> None:
    data = video(tmp_path)
    for frames in (4, 10, 32, -1):
        ours = decoded(data, limited(), VideoMediaIO(ImageMediaIO(), frames))
        theirs = VideoMediaIO(ImageMediaIO(), frames).load_bytes(data)
        assert np.array_equal(ours.media[0], theirs.media[0])  # type: ignore[attr-defined]
        assert ours.media[1] == theirs.media[1]  # type: ignore[attr-defined]
        assert ours.original_bytes == theirs.original_bytes == data  # type: ignore[attr-defined]


def test_a_video_is_decoded_again_where_its_batch_failed(tmp_path: Path) -> None:
    """With the same decoder, in the same way, also for others who wait for it."""
    policy, media_io = limited(), VideoMediaIO(ImageMediaIO())
    mode = decoding_mode(media_io)
    for _ in range(2):
        decoded(video(tmp_path), policy, media_io)
        assert decoding_mode(media_io) == mode


@pytest.mark.parametrize("backend", ["opencv", "opencv_dynamic", "qwen3_vl"])
def test_the_frames_of_a_video_are_admitted_together(tmp_path: Path, backend: str) -> None:
    data = video(tmp_path)
    io_ = VideoMediaIO(ImageMediaIO(), video_backend=backend)
    frames = len(io_.load_bytes(data).media[0])
    for most in (frames * 64 * 48, frames * 64 * 48 - 1):
        with pytest.raises(TooMuch) if most % (64 * 48) else nullcontext():
            decode(Content.of(data), io_, limited(), at_most(most))


def test_one_frame_of_a_video_is_limited_as_an_image(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="64x48"):
        decoded(video(tmp_path), limited(max_pixels=64 * 48 - 1), VideoMediaIO(ImageMediaIO()))


GROWN = f"""
from {__name__} import *

policy = limited()
before = peak()
film = growing(16_000)
loaded = decoded(film, policy, VideoMediaIO(ImageMediaIO(), num_frames=2))
assert loaded.media[0].shape == (1, 48, 64, 3), loaded.media[0].shape
print(len(film), peak() - before)
"""


def peak() -> int:
    """Return the most memory that this process ever had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def growing(side: int) -> bytes:
    """A film whose second picture says that it is larger than the first."""
    whole = made("flv", 2, "flv", (64, 48))
    first = whole.index(b"\x09", 13 + 11 + int.from_bytes(whole[14:17], "big"))
    second = first + 15 + int.from_bytes(whole[first + 1 : first + 4], "big")
    end = second + 11 + int.from_bytes(whole[second + 1 : second + 4], "big")
    flags, picture = whole[second + 11 : second + 12], whole[second + 12 : end]
    bits = f"{int.from_bytes(picture, 'big'):0{8 * len(picture)}b}"
    assert bits[30:49] == f"{0:03b}{64:08b}{48:08b}"
    grown = f"{bits[:30]}001{side:016b}{side:016b}{bits[49:]}0000000"
    data = flags + int(grown[: len(grown) // 8 * 8], 2).to_bytes(len(grown) // 8, "big")
    head = b"\x09" + len(data).to_bytes(3, "big") + whole[second + 4 : second + 11]
    return whole[:second] + head + data + (len(data) + 11).to_bytes(4, "big")


def test_a_film_whose_frames_grow_takes_no_memory_for_them() -> None:
    """One of 400 bytes took 700 MB, of which no budget knew."""
    ran = run_python("-c", GROWN)
    assert ran.returncode == 0, ran.stdout[-3000:]
    size, taken = map(int, ran.stdout.splitlines()[-1].split())
    assert size < 1000
    assert taken < 200


@pytest.mark.parametrize("codec", ["libx264", "libvpx-vp9"])
def test_a_film_larger_than_ffmpeg_may_decode_is_told_the_limit(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = made(codec, 2, "matroska")
    with monkeypatch.context() as patched:
        patched.setattr(decoders, "_SMALL_FRAME", 1)
        policy = limited(max_pixels=1000)
    with pytest.raises((RefusedError, ValueError), match=r"at most 1,000 pixels|12544 pixels"):
        decoded(data, policy, VideoMediaIO(ImageMediaIO()))
    loaded: Any = decoded(data, limited(), VideoMediaIO(ImageMediaIO(), num_frames=1))
    assert loaded.media[0].shape == (1, 112, 112, 3)


@pytest.mark.parametrize("sample", [np.nan, np.inf, -np.inf, 3e38, -65_505])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_samples_that_are_no_numbers(sample: float, in_pieces: bool) -> None:
    """Encoders made NaN of them, which spoiled others' answers."""

    def load(data: bytes, max_bytes: int) -> Any:
        samples, rate = load_audio(io.BytesIO(data), sr=None)
        return np.split(samples, 2), len(samples) / rate

    io_ = SpeechIO(load) if in_pieces else AudioMediaIO()
    heard = np.zeros(2000, np.float32)
    heard[1500] = 32_768
    assert decoded(floats(heard), limited(), io_)
    heard[1600] = sample
    with pytest.raises(RefusedError, match="no numbers, or beyond 65,504"):
        decoded(floats(heard), limited(), io_)


@pytest.mark.parametrize("frames", [-1, 3])
def test_a_sequence_of_jpegs_is_limited(frames: int) -> None:
    url = jpeg_sequence(3)

    def load(most: int) -> object:
        content = read_data_url(url, 1 << 20, jpeg_frames=True)
        return decode(content, VideoMediaIO(ImageMediaIO(), frames), limited(), at_most(most))

    ours = load(3 * 64 * 48)
    theirs = VideoMediaIO(ImageMediaIO(), frames).load_base64("video/jpeg", url.partition(",")[2])
    assert np.array_equal(ours.media[0], theirs.media[0])  # type: ignore[attr-defined]
    assert ours.original_bytes == theirs.original_bytes  # type: ignore[attr-defined]
    with pytest.raises(TooMuch):
        load(3 * 64 * 48 - 1)


def made(
    codec: str,
    frames: int,
    format_: str = "mp4",
    size: tuple[int, int] = (112, 112),
    options: dict[str, str] | None = None,
) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format_) as file:
        stream: Any = file.add_stream(codec, rate=4, options=options)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            grey = np.full((*size[::-1], 3), 20 * number + 20, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize("format_", ["mp4", "avi", "matroska"])
def test_a_film_of_one_frame_has_it(format_: str) -> None:
    """vLLM looks for its end, from where OpenCV does not find back: no frames."""
    for frames in (1, 2):
        loaded: Any = decoded(
            made("mpeg4", frames, format_), limited(), VideoMediaIO(ImageMediaIO(), num_frames=2)
        )
        assert loaded.media[0].shape == (frames, 112, 112, 3)
        assert np.abs(loaded.media[0][0].astype(int) - 20).max() < 9


def test_a_codec_that_can_not_be_read_is_named() -> None:
    """OpenCV opens it, and has no decoder for AV1 but in hardware."""
    with pytest.raises(RefusedError, match=r"none of its frames can be decoded here \(codec av1\)"):
        decoded(AV1["mp4"], limited(), VideoMediaIO(ImageMediaIO()))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<!DOCTYPE html><p>no", "a web page"),
        (b"\xef\xbb\xbf \n<html lang=en>", "a web page"),
        (b'<?xml version="1.0"?><svg/>', "SVG"),
        (b"<Error><Code>AccessDenied</Code></Error>", "XML"),
        (b'{"error": 1}', "JSON"),
        (b"%PDF-1.7", "PDF"),
        (b"\0\0\0\x1cftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0heicmif1", "HEIF"),
        (b"\xff\x0a\0", "JPEG XL"),
        (b"", "empty"),
        (b"nothing", "in no known format"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, name: str) -> None:
    with pytest.raises(RefusedError, match=f"^it is {name}"):
        decoded(data, limited())


def test_pictures_of_phones_are_taken() -> None:
    assert picture_pixels(blank_picture(8192), limited()) == 8192 * 8192


LARGE = (2800, 1501)


def opaque(mode: str) -> Image.Image:
    noise = Image.effect_noise(LARGE, 90.0)
    if mode in ("L", "1", "P"):
        return noise.convert(mode)
    bands = [noise, noise.rotate(90), noise.rotate(180), noise.rotate(270)]
    return Image.merge(mode, bands[: len(Image.new(mode, (1, 1)).getbands())])


@pytest.mark.parametrize("transparency", [None, 7])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1"])
def test_a_large_picture_becomes_rgb_as_by_vllm(mode: str, transparency: int | None) -> None:
    """Strip by strip: bands of transparency took as much memory as the picture."""
    buffer = io.BytesIO()
    shown = opaque(mode)
    options = {} if transparency is None or "A" in mode else {"transparency": transparency}
    shown.save(buffer, "PNG", compress_level=1, **options)
    media_io = ImageMediaIO(rgba_background_color=(9, 200, 30))
    theirs = convert_image_mode(Image.open(buffer), "RGB", (9, 200, 30))
    loaded: Any = decoded(buffer.getvalue(), limited(), media_io)
    assert loaded.media.mode == "RGB"
    assert loaded.media.tobytes() == theirs.tobytes()


def test_a_large_deep_picture_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, and in arrays, 67 megapixels of 16 bits took a gigabyte."""
    grey = np.arange(LARGE[0] * LARGE[1]).astype(np.uint16).reshape(LARGE[::-1])
    buffer = io.BytesIO()
    Image.fromarray(grey).save(buffer, "PNG", compress_level=1)
    decodings = calls_of(monkeypatch, PngImagePlugin.PngImageFile, "load_end")
    loaded: Any = decoded(buffer.getvalue(), limited())
    assert len(decodings) == 1 and loaded.media.mode == "RGB"
    assert np.array_equal(np.asarray(loaded.media)[..., 2], grey >> 8)


def test_a_png_that_is_cut_or_damaged_is_refused() -> None:
    """Whatever stands behind the cut: Pillow took junk for pixels."""
    whole = picture("whole", (64, 64))
    assert decoded(whole, limited()) and decoded(whole + b"junk", limited())
    for cut in (40, 60, 200, len(whole) - 20):
        for behind in (b"", b"junk" * 300, bytes(2000)):
            with pytest.raises((RefusedError, ValueError)):
                decoded(whole[:cut] + behind, limited())
    at = whole.index(b"IDAT") + 30
    with pytest.raises(RefusedError, match="damaged"):
        decoded(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], limited())


def test_a_sequence_of_commas() -> None:
    content = Content.of(b"," * 10_000_000, jpeg_frames=True)
    policy = limited()
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError, match="it is empty, not a picture"):
            decode(content, VideoMediaIO(ImageMediaIO(), -1), policy, anything)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "it is not taken apart"
    finally:
        tracemalloc.stop()


def test_broken_videos(tmp_path: Path) -> None:
    whole = video(tmp_path)
    broken = (b"", b"x", whole[:100], whole[:2000], whole[2000:], jpeg(10, 10), bytes(10_000))
    for data in (*broken, *(make() for make in odd_headers.FILMS.values())):
        with contextlib.suppress(ValueError, MediaError):
            decoded(data, limited(), VideoMediaIO(ImageMediaIO()))


@pytest.mark.parametrize("sampler", ["opencv", "qwen3_vl", "glm46v"])
def test_a_film_that_says_no_length_is_counted(sampler: str) -> None:
    """vLLM 0.32 took its first frame only, or refused -36,893,488,147,419,104 frames."""
    media_io = VideoMediaIO(ImageMediaIO(), num_frames=4, video_backend=sampler)
    ours: Any = decoded(uncounted(), limited(), media_io)
    frames, metadata = ours.media
    assert metadata["total_num_frames"] == 10
    assert metadata["duration"] == 2
    assert len(frames) >= 4


def test_frames_are_not_counted_for_ever() -> None:
    """A hundred megabytes may have millions, and vLLM has no deadline."""
    data = uncounted()
    assert count_frames(60.0, data) == 10
    with pytest.raises(RefusedError, match="in time"):
        count_frames(-1.0, data)
    for nothing in (b"", b"x", bytes(10_000)):
        with pytest.raises(RefusedError, match="no frames"):
            count_frames(60.0, nothing)


@pytest.mark.parametrize("frames", [0, "x", None, 1.5, [1]])
def test_odd_numbers_of_frames(tmp_path: Path, frames: object) -> None:
    with pytest.raises((ValueError, MediaError)):
        decoded(video(tmp_path), limited(), VideoMediaIO(ImageMediaIO(), frames, fps="x"))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("format_", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "ICO", "DDS"])
def test_damaged_pictures_are_the_users_error(format_: str) -> None:
    """Bytes exchanged, cut and put in, with a fixed seed."""
    chance = random.Random(format_)
    buffer = io.BytesIO()
    Image.open(io.BytesIO(picture("damaged", (32, 32)))).save(buffer, format_)
    policy = limited(max_pixels=1_000_000)
    for _ in range(100):
        data = bytearray(buffer.getvalue())
        for _ in range(chance.choice((1, 3, 10))):
            at = chance.randrange(min(len(data), chance.choice((64, 10_000))))
            cut, put = chance.choice((0, 1, 1, 1, 9)), chance.choice((0, 1, 1, 4))
            data[at : at + cut] = chance.randbytes(put)
        with contextlib.suppress(ValueError, MediaError):
            decoded(bytes(data), policy)


class Astray(MediaIO[object]):
    """A decoder that raises what it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def load_bytes(self, data: bytes) -> object:
        raise self.error

    def load_base64(self, media_type: str, data: str) -> object:
        raise self.error

    def load_file(self, filepath: Path) -> object:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError(),
        AssertionError(),
        AttributeError(),
        EOFError(),
        IndexError(),
        KeyError(),
        NotImplementedError(),
        RecursionError(),
        SyntaxError("broken PNG file"),
        TypeError(),
        struct.error(),
        MemoryError(),
        OSError("/some/path"),
        Image.DecompressionBombError(),
    ],
)
def test_decoders_led_astray(error: Exception) -> None:
    with pytest.raises((ValueError, MediaError)):
        decoded(b"x", limited(), Astray(error))


def test_mistakes_of_ours_are_not_the_users() -> None:
    with pytest.raises(ImportError):
        decoded(b"x", limited(), Astray(ImportError()))


def test_audio_keeps_its_own_size_limit() -> None:
    assert AudioMediaIO().get_max_bytes() < FetchPolicy().max_bytes

"""Allow-list of encoded media formats, recognized by their leading bytes.

FFmpeg guesses formats by content, and some are texts that refer to other files and addresses
(ffconcat, HLS, DASH, SDP), which it then opens. All formats allowed here are binary and
self-contained. Error messages name the others.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from PIL import features

if TYPE_CHECKING:
    from av.stream import Stream

AVIF: Final = "AVIF"

IMAGE_FORMATS: Final = (
    *([AVIF] if features.check("avif") else []),
    "BMP",
    "DIB",
    "GIF",
    "ICO",
    "JPEG",
    "PNG",
    "PPM",
    "QOI",
    "TIFF",
    "WEBP",
)
"""Pillow's names. It goes by leading bytes itself, once it is told the list. Left out of what
vLLM allows is what reads other formats inside of itself without a limit, what hardly
anybody sends, and JPEG 2000: the picture inside may be far larger than the header says, and is
decoded before anybody can tell. For AVIF, which Pillow may lack,
:mod:`common.media.avif_size` tells."""

FFMPEG_FORMATS: Final = (
    "aac",
    "ac3",
    "aiff",
    "amr",
    "asf",
    "au",
    "avi",
    "caf",
    "eac3",
    "flac",
    "flv",
    "gif",
    "ivf",
    "matroska",
    "mov",
    "mp3",
    "mpeg",
    "mpegts",
    "mpegvideo",
    "mxf",
    "ogg",
    "w64",
    "wav",
    "wv",
)
"""FFmpeg's names of the containers that it may open. WebM is its ``matroska``; MP4, M4A and
3GP are its ``mov``."""

_CODECS: Final = {
    "aac", "aac_latm", "ac3", "adpcm_g722", "adpcm_g726", "adpcm_ima_qt", "adpcm_ima_wav",
    "adpcm_ms", "adpcm_swf", "adpcm_yamaha", "alac", "amr_nb", "amr_wb", "av1", "cinepak", "dnxhd",
    "dts", "dvvideo", "eac3", "ffv1", "ffvhuff", "flac", "flv1", "gif", "gsm", "gsm_ms", "h261",
    "h263", "h263p", "h264", "hevc", "huffyuv", "magicyuv", "mjpeg", "mlp", "mp1", "mp2", "mp3",
    "mpeg1video", "mpeg2video", "mpeg4", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3", "msvideo1",
    "nellymoser", "opus", "png", "prores", "qtrle", "rawvideo", "s302m", "speex", "svq1", "svq3",
    "theora", "truehd", "tta", "utvideo", "v210", "vc1", "vorbis", "vp3", "vp6", "vp6a", "vp6f",
    "vp8", "vp9", "wavpack", "wmalossless", "wmapro", "wmav1", "wmav2", "wmavoice", "wmv1", "wmv2",
    "wmv3",
}  # fmt: skip
"""FFmpeg's names of the codecs that it may decode, and those of PCM. FFmpeg has 400 more, and of
damaged data some show uninitialized memory: Flash Screen Video and CineForm did."""


def is_read(codec: str) -> bool:
    """Return whether FFmpeg may decode a codec, by its canonical name."""
    return codec in _CODECS or codec.startswith("pcm_")


def check_codecs(streams: "Iterable[Stream]") -> None:
    """Raise ValueError if streams of PyAV have another codec."""
    for stream in streams:
        # Of an unknown codec there is no context.
        codec = getattr(stream.codec_context, "codec", None)
        name = codec and codec.canonical_name
        if not is_read(str(name)):
            raise ValueError(f"Its codec ({name}) is not read: send H.264, VP9, AAC or FLAC")


_LEADING: Final = (
    b"\x1a\x45\xdf\xa3",  # Matroska, WebM
    b"\x00\x00\x01\xb3",  # MPEG video
    b"\x00\x00\x01\xba",  # MPEG program stream
    b"\x06\x0e\x2b\x34",  # MXF
    b"\x0b\x77",  # AC-3
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",  # ASF
    b"#!AMR",
    b".snd",
    b"ADIF",
    b"DKIF",  # IVF
    b"FLV\x01",
    b"GIF87a",
    b"GIF89a",
    b"OggS",
    b"caff",
    b"fLaC",
    b"riff\x2e\x91\xcf\x11",  # Wave64
    b"wvpk",
)
WEB_PAGE: Final = "a web page (HTML)"
_NOT_READ: Final = (
    (re.compile(rb".{4}ftyp(?:avi[fs]|m[is]f1.{4}(?:.{4}){0,8}?avif)", re.DOTALL), AVIF),
    (re.compile(rb".{4}ftyp(?:hei[cfms]|hev[cmsx])", re.DOTALL), "HEIC"),
    (re.compile(rb".{4}ftyp(?:mif1|msf1)", re.DOTALL), "HEIF"),
    (re.compile(rb"\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51"), "JPEG 2000"),
    (re.compile(rb"\x00\x00\x00\x0cJXL |\xff\x0a"), "JPEG XL"),
    (re.compile(rb"8BPS"), "a Photoshop file"),
    (re.compile(rb"%PDF-"), "PDF"),
    (re.compile(rb"%!PS"), "PostScript"),
    (re.compile(rb"MThd"), "MIDI"),
    (re.compile(rb"\.RMF|\.ra\xfd"), "RealMedia"),
    (re.compile(rb"#EXTM3U|ffconcat"), "a playlist"),
    (re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?<(?:!doctype )?svg", re.IGNORECASE), "SVG"),
    (re.compile(rb"\s*<(?:!doctype\s+html|html|head|body)", re.IGNORECASE), WEB_PAGE),
)
"""Leading bytes of formats that clients send and no decoder here may read."""
_HEAD: Final = 1024
_KINDS_OF_RIFF: Final = (b"WAVE", b"AVI ", b"AVIX")
_FIRST_BOXES: Final = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_TS_PACKETS: Final = (188, 192)
"""Bytes of a packet of MPEG-TS; camcorders put four before each (AVCHD)."""

_FRAMES: Final = tuple(b"\xff%c" % kind for kind in b"\xe2\xe3\xf1\xf2\xf3\xf9\xfa\xfb\xfc\xfd")
"""Beginnings of a frame of MP3, MP2 or AAC."""
_MAX_CUT: Final = 1 << 14
_MAX_PADDING: Final = 4096
_MAX_TAGS: Final = 8


def is_known_container(data: bytes) -> bool:
    """Return whether audio or video begins like an allowed container."""
    start = after_tags(data)
    if start > 0:
        data = data[start : start + _MAX_PADDING].lstrip(b"\0")
    head = data[: 3 * max(_TS_PACKETS)]
    return (
        head.startswith(_LEADING)
        or (head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] in _KINDS_OF_RIFF)
        or (head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"))
        or head[4:8] in _FIRST_BOXES
        or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0)  # MP3, AAC
        or any(data.count(frame, 0, _MAX_CUT) > 2 for frame in _FRAMES)  # amid a frame
        or any(head[at::size][:3] == b"GGG" for size in _TS_PACKETS for at in range(size))
    )


def name_of_unread(data: bytes) -> str | None:
    """Return the name of a known format that is not allowed, else None."""
    head = data[:_HEAD]
    return next((name for begins, name in _NOT_READ if begins.match(head)), None)


def after_tags(data: bytes | memoryview) -> int:
    """Return the offset of the medium, behind ID3 tags, as FFmpeg does."""
    start = 0
    for _ in range(_MAX_TAGS):
        tag = data[start : start + 10]
        if len(tag) < 10 or tag[:3] != b"ID3" or any(byte & 0x80 for byte in tag[6:]):
            break
        size = tag[6] << 21 | tag[7] << 14 | tag[8] << 7 | tag[9]
        start += 10 + size + (10 if tag[5] & 0x10 else 0)
    return start


_NAMES: Final = (
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x1a\x45\xdf\xa3", "Matroska or WebM"),
    (b"RIFF", "a sound or film (RIFF)"),
    (b"OggS", "Ogg"),
    (b"fLaC", "FLAC"),
    (b"ID3", "MP3"),
    (b"\x89PNG", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"{", "JSON"),
    (b"[", "JSON"),
    (b"<", "XML"),
)
_START: Final = 1024


def is_web_page(data: bytes) -> bool:
    """Return whether data is HTML, as servers send it instead of a missing file."""
    return name_of_unread(_text(data)) == WEB_PAGE


def name_of(data: bytes) -> str | None:
    """Return the name of a format, None if unknown."""
    text = _text(data)
    if (unread := name_of_unread(data) or name_of_unread(text)) is not None:
        return unread
    if data[4:8] == b"ftyp":
        return "MP4 or QuickTime"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    found = (name for start, name in _NAMES if data.startswith(start) or text.startswith(start))
    return next(found, None)


def _text(data: bytes) -> bytes:
    return data[:_START].removeprefix(b"\xef\xbb\xbf").lstrip()

"""Restrict the decoders of a process to their input bytes, and to bounded memory.

FFmpeg is reached through PyAV and OpenCV. Both may open only the listed containers, and no file or
address. Index tables are checked first, and no single allocation may exceed a medium's limit.
TorchCodec can't be restricted, so it is disabled. Pillow may read only the listed formats.
``common/media/tensor_files.py`` replaces PyTorch for clients' tensors.

Applies to the whole process: vLLM's loaders, its transcription route, and a model's own code.
"""

import contextlib
import ctypes
import logging
import math
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from functools import wraps
from io import SEEK_SET, BytesIO
from itertools import count, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

import av
import cv2
import numpy as np
import torch
from PIL import (
    AvifImagePlugin,
    ExifTags,
    Image,
    TiffImagePlugin,
    WebPImagePlugin,
)
from vllm.multimodal import audio as resampling
from vllm.multimodal import image
from vllm.multimodal.media import ImageMediaIO, MediaWithBytes, audio
from vllm.multimodal.media import image as media_image
from vllm.multimodal.video_decoders import torchcodec

from common.media.container_tables import fault_of
from common.media.film_frames import THREADS_OF_4K, UP_TO_4K, VerifiedCapture, check_texts
from common.media.formats import AVIF, FFMPEG_FORMATS, IMAGE_FORMATS, check_codecs, is_read
from common.media.picture_metadata import limit_metadata
from common.media.picture_strips import LARGE, is_large, strips
from common.media.quick_decoders import BmpRuns, Ppm, Qoi, RefusedPlainText
from common.media.resampling import thrifty_resampler
from common.media.tensor_files import load as load_tensor
from common.media.webp_and_avif import WebP, open_avif

logger = logging.getLogger(__name__)

_NO_PROTOCOL: Final = "none"  # the name of no protocol or codec; OpenCV takes no empty list


def _decoders() -> Iterator[str]:
    """Yield FFmpeg's names of what decodes the codecs that are read."""
    for name in av.codecs_available:
        with contextlib.suppress(av.codec.codec.UnknownCodecError):  # it encodes only
            if is_read(av.Codec(name, "r").canonical_name):
                yield name


_OPTIONS: Final = {
    "protocol_whitelist": _NO_PROTOCOL,
    "format_whitelist": ",".join(FFMPEG_FORMATS),
    "codec_whitelist": ",".join(_decoders()),  # of each stream a frame is decoded to open a file
}
_OPENCV_OPTIONS: Final = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
"""OpenCV reads it from the environment whenever it opens a video."""

_OPENCV_LOGS: Final = "OPENCV_FFMPEG_LOGLEVEL"
_QUIET: Final = "-8"  # FFmpeg's ``AV_LOG_QUIET``

_PYAV_OPEN: Final[Any] = av.open
_PYAV_RESAMPLER: Final[Any] = av.AudioResampler
_OPENCV_OPEN: Final[Any] = cv2.VideoCapture

MAX_FFMPEG_BYTES: Final = 320 << 20
"""Of one piece of FFmpeg's memory: the largest packet, or plane of a frame, that is ever let in."""

_MAX_ALLOC: Final = "av_max_alloc"
_MAX_PIXELS: Final = b"max_pixels"
_ANY_NUMBER: Final = 2**31 - 1  # the option's own default
_FREE_CALLS: Final = 20_000  # of a film's ``read`` and ``seek``, however small it is
_BYTES_PER_CALL: Final = 128
"""A film with its sound behind its pictures takes two calls a frame, others one for 4 KiB."""

OPENING_S: Final = 3.0
"""Of a core, to open a film or sound, which takes milliseconds: its titles and tables."""

_MAX_STREAMS: Final = {"video": (4, "pictures"), "cover": (16, "covers"), "audio": (32, "sound")}
"""Streams of a file. FFmpeg decodes a frame of each to open it, and keeps those of pictures: 41 of
8K in 270 KB took more than 3 GB, 901 of AAC 0.6 GB."""

_WITHOUT_CODECS: Final = {
    "metadata_errors": "replace",
    "container_options": {**_OPTIONS, "codec_whitelist": _NO_PROTOCOL},
}

_UNCOUNTABLE_PLANES: Final = 8  # of a sound, which FFmpeg has a list of its own for beyond these

SOUND_RATES: Final = range(1_000, 768_001)
"""Hz. A sound of 600 samples at 1 Hz takes 430 MB while it is resampled."""

_VLLMS_SOUNDFILE: Final[Any] = audio.soundfile
_FRAMES_AT_ONCE: Final = 1 << 16

_TORCH_LOAD: Final[Any] = torch.load

_VLLMS_LOAD: Final[Any] = ImageMediaIO.load_bytes
_VLLMS_UPRIGHT: Final[Any] = image.normalize_image
_TURNED: Final = range(2, 9)
"""Orientations of EXIF other than upright."""

_VLLMS_CONVERT: Final[Any] = ImageMediaIO._convert_image_mode

_DEEP: Final = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
"""Pillow's modes of up to 16 bits; ``I`` is one as well in a PNG or a PPM."""

_PNG_BITS: Final = 16
_ENDLESS: Final = ("I", "F")
_UNKNOWN_RANGE: Final = (
    "Its pixels are signed, 32-bit or floating-point numbers that are not from 0 to 255: send a "
    "picture of 8 or 16 bits"
)

_NO_TORCHCODEC: Final = "TorchCodec can't be kept from opening what a medium refers to"


class _Refusing:
    """Replacement of TorchCodec's decoder."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ValueError(f"{_NO_TORCHCODEC}; use the opencv backend")


def guard_decoders() -> None:
    """Guard this process's decoders from now on. May be called twice."""
    os.environ[_OPENCV_OPTIONS] = "|".join(f"{key};{value}" for key, value in _OPTIONS.items())
    # Warnings about a medium are its sender's doing, and could fill the log.
    os.environ.setdefault(_OPENCV_LOGS, _QUIET)
    if "OPENCV_LOG_LEVEL" not in os.environ:
        cv2.utils.logging.setLogLevel(0)
    Image.init()  # imports plugins, which the first picture would where no file can be opened
    image.ALLOWED_IMAGE_FORMATS = IMAGE_FORMATS
    limit_metadata()
    Image.register_decoder("bmp_rle", BmpRuns)
    Image.register_decoder("ppm_plain", RefusedPlainText)
    Image.register_decoder("ppm", Ppm)
    Image.register_decoder("qoi", Qoi)
    Image.register_open(AVIF, open_avif, AvifImagePlugin._accept)
    Image.register_open("WEBP", WebP, WebPImagePlugin._accept)
    # vLLM then falls back to its other readers.
    audio.AudioDecoder = None
    audio._torchcodec_import_exc = ImportError(_NO_TORCHCODEC)
    resampling._get_torchaudio_resampler = thrifty_resampler
    torchcodec.VideoDecoder = _Refusing
    av.open = _guarded_open
    vars(av)["AudioResampler"] = _Resampler
    audio.soundfile = SimpleNamespace(**{**vars(_VLLMS_SOUNDFILE), "SoundFile": _SoundFile})
    torch.load = _guarded_load
    ImageMediaIO.load_bytes = _load_deep
    ImageMediaIO._convert_image_mode = _convert
    media_image.normalize_image = _turn_upright
    cv2.VideoCapture = _guarded_capture  # type: ignore[assignment, misc] # its objects
    _limit_ffmpegs_memory()
    for path in _libraries("libtiff"):  # which says on the log each row of a fax that is damaged
        ctypes.CDLL(path).TIFFSetErrorHandler(None)


@wraps(_VLLMS_LOAD)
def _load_deep(self: ImageMediaIO, data: bytes) -> MediaWithBytes[Image.Image]:
    """Load like vLLM, but convert grey of 9 to 16 bits to 8: Pillow would clip all above 255 to
    white. Marks it in the hashed configuration, since vLLM makes other pixels of the same bytes."""
    if self.image_mode is None or not (bits := _deep_bits(data)):
        loaded: MediaWithBytes[Image.Image] = _VLLMS_LOAD(self, data)
        return loaded
    plain = copy(self)
    plain.image_mode = None
    deep = _VLLMS_LOAD(plain, data).media
    grey = Image.new("L", deep.size)
    for top, strip in strips(deep):
        values = np.asarray(strip) >> (bits - 8)
        grey.paste(Image.fromarray(values.astype(np.uint8)), (0, top))
    config = {
        "image_mode": self.image_mode,
        "rgba_background_color": self.rgba_background_color,
        "bits": 8,
    }
    return MediaWithBytes(self._convert_image_mode(grey), data, config)


def _turn_upright(picture: Image.Image) -> Image.Image:
    """Orient like vLLM, but without copying an upright picture: 0.3 GB for the largest."""
    picture.load()  # of a TIFF, the next use would not say that it is damaged
    with contextlib.suppress(Exception):  # as vLLM's does: the next use of the picture says it
        if picture.getexif().get(ExifTags.Base.Orientation) in _TURNED:
            return _VLLMS_UPRIGHT(picture)
    return picture


def _deep_bits(data: bytes) -> int:
    """Return the bits of a grey pixel if they are more than 8, else 0. Raises ValueError for
    signed, 32-bit or float ones that are not from 0 to 255, which would come out black or white."""
    with contextlib.suppress(OSError), image.open_image(BytesIO(data)) as opened:
        if opened.mode in _DEEP or (opened.mode == "I" and opened.format in ("PNG", "PPM")):
            tags = getattr(opened, "tag_v2", {})
            return max(8, *np.atleast_1d(tags.get(TiffImagePlugin.BITSPERSAMPLE, _PNG_BITS)))
        if opened.mode in _ENDLESS:
            low, high = opened.getextrema()
            if not 0 <= low <= high <= 255 or 0 < high <= 1:
                raise ValueError(_UNKNOWN_RANGE)
    return 0


@wraps(_VLLMS_CONVERT)
def _convert(self: ImageMediaIO, picture: Any) -> Image.Image:
    """Convert like vLLM, but a large picture strip by strip: its transparency alone took as much
    memory again, and held the GIL. For LAB Pillow prepares each conversion, for 14 ms."""
    picture = picture.media if isinstance(picture, MediaWithBytes) else picture
    if self.image_mode != "RGB" or picture.mode in ("LAB", "RGB") or not is_large(picture):
        made: Image.Image = _VLLMS_CONVERT(self, picture)
        return made
    made = Image.new("RGB", picture.size)
    for top, strip in strips(picture):
        made.paste(_VLLMS_CONVERT(self, strip), (0, top))
    return made


def limit_frames(max_pixels: int) -> None:
    """Limit FFmpeg's decoders to frames of ``max_pixels``, or log a warning. OpenCV sets no option
    on decoders, so the option's default is changed."""
    for path in _libraries("libavcodec"):
        try:
            _set_default(ctypes.CDLL(path), _MAX_PIXELS, min(max_pixels, _ANY_NUMBER))
        except (OSError, LookupError) as error:
            logger.warning(
                "frames of films may be larger than their headers say, up to %d MiB: %s: %s",
                MAX_FFMPEG_BYTES >> 20,
                path,
                error,
            )


def _set_default(library: ctypes.CDLL, name: bytes, value: int) -> None:
    """Set the default of an option of all codecs. Raises OSError or LookupError."""
    libc = ctypes.CDLL(None, use_errno=True)
    library.avcodec_get_class.restype = ctypes.POINTER(_CodecClass)
    options = library.avcodec_get_class().contents.options
    found = next((each for each in _until_unnamed(options) if each.name == name), None)
    if found is None or not 0 < found.default <= _ANY_NUMBER:
        raise LookupError(f"its option {name.decode()} isn't where it was in FFmpeg 5 to 8")
    place = ctypes.addressof(found)
    page = place - place % mmap.PAGESIZE
    size = ctypes.c_size_t(place - page + ctypes.sizeof(found))
    # Relocated data is read-only. It stays writable: the page may hold other data.
    if libc.mprotect(ctypes.c_void_p(page), size, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "its options can't be written to")
    found.default = value


class _Option(ctypes.Structure):
    """``AVOption`` of FFmpeg."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("help", ctypes.c_char_p),
        ("offset", ctypes.c_int),
        ("type", ctypes.c_int),
        ("default", ctypes.c_int64),
        ("least", ctypes.c_double),
        ("most", ctypes.c_double),
        ("flags", ctypes.c_int),
        ("unit", ctypes.c_char_p),
    )


class _CodecClass(ctypes.Structure):
    """The beginning of ``AVClass`` of FFmpeg."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("name_of", ctypes.c_void_p),
        ("options", ctypes.POINTER(_Option)),
    )


def _until_unnamed(options: Any) -> Iterator[Any]:
    return takewhile(lambda option: option.name, (options[at] for at in count()))


def _libraries(name: str) -> set[str]:
    """Return the paths of a library's copies in this process: PyAV and OpenCV bring one each."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if name in line}


def _limit_ffmpegs_memory() -> None:
    for path in _libraries("libavutil"):
        getattr(ctypes.CDLL(path), _MAX_ALLOC)(ctypes.c_size_t(MAX_FFMPEG_BYTES))


def _check(data: bytes, *, film: bool = False) -> None:
    """Raise ValueError if a medium's tables would make FFmpeg allocate for missing data, its
    metadata take hours, its streams gigabytes, or seeking in a film end the process."""
    if fault := fault_of(data):
        raise ValueError(f"The medium {fault}")
    streams: Counter[str] = Counter()
    with (
        contextlib.suppress(av.error.FFmpegError),  # opening it again says so
        _timely_opened(data, **_WITHOUT_CODECS) as container,
    ):
        streams.update(
            "cover" if av.stream.Disposition.attached_pic in stream.disposition else stream.type
            for stream in container.streams
        )
        check_texts(container, data)
        if film and streams["cover"] and container.format.name == "ogg":
            # FFmpeg counts no covers where it asserts that the stream to seek in exists.
            raise ValueError("The medium is Ogg with a cover, which is not read as a film")
    for kind, (most, name) in _MAX_STREAMS.items():
        if streams[kind] > most:
            raise ValueError(
                f"The medium has {streams[kind]} streams of {name}: at most {most} are taken"
            )


def _timely_opened(data: bytes, *args: object, **options: object) -> Any:
    """Open by PyAV. Raises ValueError if that takes too long."""
    source = _Timed(data)
    container = _PYAV_OPEN(source, "r", *args, **options)
    source.opened()
    return container


class _Timed(BytesIO):
    """Bytes that end after :data:`OPENING_S` of a core, until :meth:`opened`: FFmpeg compares each
    title with all before it, and nothing stops it but the end of the file."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._until = time.thread_time() + OPENING_S

    def opened(self) -> None:
        """Give all bytes from now on. Raises ValueError if the time was over."""
        if time.thread_time() >= self._until:
            raise ValueError("The medium takes too long to open: it has too many titles, or tables")
        self._until = math.inf

    def read(self, size: int | None = -1, /) -> bytes:
        """Return bytes; none when the time is over."""
        return super().read(size) if time.thread_time() < self._until else b""


class _Steady(_Timed):
    """Bytes for OpenCV, which crashes the process if a stream's ``seek`` raises. FFmpeg seeks to
    offsets of a film's tables, truncated by OpenCV to 32 signed bits. OpenCV leaks 64 bytes per
    call, and 7 kB of ASF cause millions of calls: after a maximum the film ends."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._calls_left = _FREE_CALLS + len(data) // _BYTES_PER_CALL

    def read(self, size: int | None = -1, /) -> bytes:
        """Return bytes; none after the last allowed call."""
        self._calls_left -= 1
        return super().read(size) if self._calls_left > 0 else b""

    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        """Return the new position, -1 if it is invalid."""
        self._calls_left -= 1
        if self._calls_left <= 0:
            return -1
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return -1


class _Capture:
    """A ``cv2.VideoCapture`` of bytes, which outlive it: OpenCV releases them without the GIL. Not
    a subclass: OpenCV corrupts memory when it frees objects of one."""

    def __init__(self, data: bytes, backend: int, options: Sequence[int]) -> None:
        self._open(data, backend, options)
        sides = (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
        pixels = int(math.prod(map(self._capture.get, sides)))
        if pixels > LARGE:  # each thread keeps a frame, and a machine may have a hundred
            del self._capture
            threads = THREADS_OF_4K if pixels <= UP_TO_4K else 1
            self._open(data, backend, [*options, cv2.CAP_PROP_N_THREADS, threads])

    def _open(self, data: bytes, backend: int, options: Sequence[int]) -> None:
        self._source = _Steady(data)
        self._capture: Any = VerifiedCapture(_OPENCV_OPEN(self._source, backend, options), data)
        self._source.opened()

    def __del__(self) -> None:
        self._capture = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)


def _guarded_capture(*args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], BytesIO):
        data = args[0].getvalue()
        _check(data, film=True)
        return _Capture(data, *args[1:], **kwargs)
    return _OPENCV_OPEN(*args, **kwargs)


class _Opened:
    """A PyAV container that mixes the channels of audio frames: vLLM keeps all of them until the
    last frame, thrice. It takes interleaved channels for one, and does not scale integers. PyAV
    counts planes up to a null pointer: eight channels have none and crash the process."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._container.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def decode(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        check_codecs(self._container.streams.get(*args, **kwargs))
        packer = av.AudioResampler(format="flt")
        for frame in self._container.decode(*args, **kwargs):
            if not isinstance(frame, av.AudioFrame):
                yield frame
            elif frame.format.name == "fltp" and frame.layout.nb_channels < _UNCOUNTABLE_PLANES:
                yield _Mixed(frame)
            else:
                yield from map(_mean, packer.resample(frame))


class _Mixed:
    """An audio frame of several planes (``av.AudioFrame`` is not subclassable) that gives the mean
    of its channels, as vLLM computes it from all of them."""

    def __init__(self, frame: av.AudioFrame) -> None:
        self.frame = frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self.frame, name)

    def to_ndarray(self) -> np.ndarray:
        """Return one row of samples."""
        mean: np.ndarray = self.frame.to_ndarray().astype(np.float32).mean(axis=0, keepdims=True)
        return mean


class _SoundFile:
    """A ``soundfile.SoundFile`` (subclasses are not typed) whose channels are mixed while they are
    read, as vLLM does with all of them in memory: eight took 0.9 GB for ten minutes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = _VLLMS_SOUNDFILE.SoundFile(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, **kwargs: Any) -> np.ndarray:
        """Return the mean of the channels."""
        if self._file.channels == 1:
            alone: np.ndarray = self._file.read(**kwargs)
            return alone
        mixed = np.empty(self._file.frames, np.float32)
        read = 0
        while len(piece := self._file.read(_FRAMES_AT_ONCE, **kwargs)):
            mixed[read : read + len(piece)] = piece.mean(axis=1)
            read += len(piece)
        return mixed[:read]


class _Resampler:
    """PyAV's resampler (not subclassable), limited to real sample rates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._resampler = _PYAV_RESAMPLER(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resampler, name)

    def resample(self, frame: av.AudioFrame | _Mixed | None) -> list[av.AudioFrame]:
        """Return frames at the new rate. Raises ValueError: the old rate is unrealistic."""
        frame = frame.frame if isinstance(frame, _Mixed) else frame
        if frame is not None and (rate := frame.sample_rate) not in SOUND_RATES:
            raise ValueError(f"Its sample rate of {rate} Hz is none that sound has")
        frames: list[av.AudioFrame] = self._resampler.resample(frame)
        return frames


def _mean(packed: av.AudioFrame) -> av.AudioFrame:
    """Return the mean of a frame's channels, as vLLM does."""
    samples = packed.to_ndarray().reshape(-1, packed.layout.nb_channels)
    mono = av.AudioFrame.from_ndarray(samples.mean(axis=1)[None], format="fltp", layout="mono")
    mono.sample_rate, mono.pts, mono.time_base = packed.sample_rate, packed.pts, packed.time_base
    return mono


@wraps(_PYAV_OPEN)
def _guarded_open(file: Any, mode: str | None = None, *args: Any, **kwargs: Any) -> Any:
    if mode in (None, "r"):
        # Only titles and the like.
        kwargs.setdefault("metadata_errors", "replace")
        kwargs["container_options"] = {**(kwargs.get("container_options") or {}), **_OPTIONS}
        if not isinstance(file, BytesIO):
            return _Opened(_PYAV_OPEN(file, mode, *args, **kwargs))
        data = file.getvalue()
        _check(data)
        return _Opened(_timely_opened(data, *args, **kwargs))
    return _PYAV_OPEN(file, mode, *args, **kwargs)


@wraps(_TORCH_LOAD)
def _guarded_load(f: Any, *args: Any, **kwargs: Any) -> Any:
    # Weights of models come from files by their path.
    if isinstance(f, BytesIO) and kwargs.get("weights_only"):
        return load_tensor(f.getvalue())
    return _TORCH_LOAD(f, *args, **kwargs)

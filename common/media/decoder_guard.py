"""Keeps the decoders of a process to the bytes that they are given, and to the memory these need.

FFmpeg is reached by two ways, PyAV and OpenCV. Either is told which containers it may open,
and that it may open nothing else: no file, no address. What its tables claim is looked at first,
and no single piece of memory may be larger than a medium may be. TorchCodec takes no such orders,
so it is not used. Pillow is told which formats it may read. Tensors that clients send are read by
``common/media/tensor_files.py`` instead of PyTorch.

Holds for the whole process, whoever calls the decoders: vLLM's loaders, its route for
transcriptions, or a model's own code.
"""

import ctypes
import os
from copy import copy
from functools import wraps
from io import SEEK_SET, BytesIO
from pathlib import Path
from typing import IO, Any, Final

import av
import cv2
import numpy as np
import torch
from PIL import AvifImagePlugin, Image, ImageFile, PpmImagePlugin
from vllm.multimodal import image
from vllm.multimodal.media import ImageMediaIO, MediaWithBytes, audio
from vllm.multimodal.video_decoders import torchcodec

from common.media.avif_size import avif_pixels
from common.media.formats import AVIF, FFMPEG_FORMATS, IMAGE_FORMATS
from common.media.tables import claims_too_much
from common.media.tensor_files import load as load_tensor

_NO_PROTOCOL: Final = "none"
"""The name of no protocol; OpenCV can't be given an empty list."""

_OPTIONS: Final = {
    "protocol_whitelist": _NO_PROTOCOL,
    "format_whitelist": ",".join(FFMPEG_FORMATS),
}
_OPENCV_OPTIONS: Final = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
"""OpenCV reads it from the environment whenever it opens a video."""

_PYAV_OPEN: Final[Any] = av.open
_OPENCV_OPEN: Final[Any] = cv2.VideoCapture

MAX_FFMPEG_BYTES: Final = 320 << 20
"""Of one piece of FFmpeg's memory: the largest packet, or plane of a frame, that is ever let in."""

_MAX_ALLOC: Final = "av_max_alloc"

_TORCH_LOAD: Final[Any] = torch.load

_VLLMS_LOAD: Final[Any] = ImageMediaIO.load_bytes
_DEEP: Final = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
"""Pillow's modes of 16 bits; ``I`` is one as well in a PNG or a PPM."""

_NO_TORCHCODEC: Final = "TorchCodec can't be kept from opening what a medium refers to"


class _Refusing:
    """In the place of TorchCodec's decoder."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ValueError(f"{_NO_TORCHCODEC}; use the opencv backend")


class _RefusingPlainText(PpmImagePlugin.PpmPlainDecoder):
    """In the place of Pillow's decoder of PPM in plain text, which takes a minute for a
    megabyte of comments."""

    def decode(self, buffer: Any) -> tuple[int, int]:
        raise ValueError("PPM in plain text is not read; send the binary variant")


def guard_decoders() -> None:
    """Guard this process's decoders from now on. May be called twice."""
    os.environ[_OPENCV_OPTIONS] = "|".join(f"{key};{value}" for key, value in _OPTIONS.items())
    image.ALLOWED_IMAGE_FORMATS = IMAGE_FORMATS
    Image.register_decoder("ppm_plain", _RefusingPlainText)
    Image.register_open(AVIF, _open_avif, AvifImagePlugin._accept)
    # vLLM goes on to its other readers then.
    audio.AudioDecoder = None
    audio._torchcodec_import_exc = ImportError(_NO_TORCHCODEC)
    torchcodec.VideoDecoder = _Refusing
    av.open = _guarded_open
    torch.load = _guarded_load
    ImageMediaIO.load_bytes = _load_deep
    cv2.VideoCapture = _guarded_capture  # type: ignore[assignment, misc] # its objects
    _limit_ffmpegs_memory()


@wraps(_VLLMS_LOAD)
def _load_deep(self: ImageMediaIO, data: bytes) -> MediaWithBytes[Image.Image]:
    """vLLM's own, but grey of 16 bits becomes grey of 8: Pillow cuts all above 255 to white.

    Says so in what hashes are made of, since vLLM makes other pixels of the same bytes.
    """
    loaded: MediaWithBytes[Image.Image] = _VLLMS_LOAD(self, data)
    if self.image_mode is None or not _is_deep(data):
        return loaded
    plain = copy(self)
    plain.image_mode = None
    deep = np.asarray(_VLLMS_LOAD(plain, data).media)
    grey = Image.fromarray((deep >> 8).astype(np.uint8))
    config = {**(loaded.io_config or {}), "bits": 8}
    return MediaWithBytes(self._convert_image_mode(grey), data, config)


def _open_avif(fp: IO[bytes], filename: str | bytes = "") -> ImageFile.ImageFile:
    """Pillow's own, for a file whose pictures are no larger than Pillow lets any be."""
    pixels = avif_pixels(fp.read())
    if Image.MAX_IMAGE_PIXELS is not None and pixels > 2 * Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError(f"an AVIF with a picture of ({pixels} pixels)")
    fp.seek(0)
    return AvifImagePlugin.AvifImageFile(fp, filename)


def _is_deep(data: bytes) -> bool:
    with image.open_image(BytesIO(data)) as opened:
        return opened.mode in _DEEP or (opened.mode == "I" and opened.format in ("PNG", "PPM"))


def _limit_ffmpegs_memory() -> None:
    """In each FFmpeg that this process has: PyAV and OpenCV bring one of their own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[-1] for line in lines if "libavutil" in line}:
        getattr(ctypes.CDLL(path), _MAX_ALLOC)(ctypes.c_size_t(MAX_FFMPEG_BYTES))


def _check_tables(source: object) -> None:
    """Raise ValueError if FFmpeg would take memory for what a medium only claims to have."""
    if not isinstance(source, BytesIO):
        return
    with source.getbuffer() as data:
        claims = claims_too_much(data)
    if claims:
        raise ValueError("The medium claims more samples than it can hold")


class _Steady(BytesIO):
    """Bytes for OpenCV, which ends the process where a stream's ``seek`` raises.

    FFmpeg seeks to what a film's tables say, of which OpenCV keeps 32 bits with their sign.
    """

    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        """Return the new place, -1 if there is none such."""
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return -1


class _Capture:
    """A ``cv2.VideoCapture`` of bytes, which outlive it.

    OpenCV lets go of its source without the interpreter's lock, so it must not be the last one to.
    Not a subclass: OpenCV frees objects of such in a way that damages memory.
    """

    def __init__(self, data: bytes, *args: Any, **kwargs: Any) -> None:
        self._source = _Steady(data)
        self._capture = _OPENCV_OPEN(self._source, *args, **kwargs)

    def __del__(self) -> None:
        self._capture = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)


def _guarded_capture(*args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], BytesIO):
        _check_tables(args[0])
        return _Capture(args[0].getvalue(), *args[1:], **kwargs)
    return _OPENCV_OPEN(*args, **kwargs)


@wraps(_PYAV_OPEN)
def _guarded_open(file: Any, mode: str | None = None, *args: Any, **kwargs: Any) -> Any:
    if mode in (None, "r"):
        _check_tables(file)
        # Titles and the like, which nobody looks at.
        kwargs.setdefault("metadata_errors", "replace")
        kwargs["container_options"] = {**(kwargs.get("container_options") or {}), **_OPTIONS}
    return _PYAV_OPEN(file, mode, *args, **kwargs)


@wraps(_TORCH_LOAD)
def _guarded_load(f: Any, *args: Any, **kwargs: Any) -> Any:
    # Weights of models come from files by their path.
    if isinstance(f, BytesIO) and kwargs.get("weights_only"):
        return load_tensor(f.getvalue())
    return _TORCH_LOAD(f, *args, **kwargs)

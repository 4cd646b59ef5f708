"""Keeps the decoders of a process to the bytes that they are given.

FFmpeg is reached by two ways, PyAV and OpenCV. Either is told which containers it may open,
and that it may open nothing else: no file, no address. TorchCodec takes no such orders, so it
is not used. Pillow is told which formats it may read.

Holds for the whole process, whoever calls the decoders: vLLM's loaders, its route for
transcriptions, or a model's own code.
"""

import os
from functools import wraps
from typing import Any, Final

import av
from PIL import Image, PpmImagePlugin
from vllm.multimodal import image
from vllm.multimodal.media import audio
from vllm.multimodal.video_decoders import torchcodec

from common.media_formats import FFMPEG_FORMATS, IMAGE_FORMATS

_NO_PROTOCOL: Final = "none"
"""The name of no protocol; OpenCV can't be given an empty list."""

_OPTIONS: Final = {
    "protocol_whitelist": _NO_PROTOCOL,
    "format_whitelist": ",".join(FFMPEG_FORMATS),
}
_OPENCV_OPTIONS: Final = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
"""OpenCV reads it from the environment whenever it opens a video."""

_PYAV_OPEN: Final[Any] = av.open

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
    # vLLM goes on to its other readers then.
    audio.AudioDecoder = None
    audio._torchcodec_import_exc = ImportError(_NO_TORCHCODEC)
    torchcodec.VideoDecoder = _Refusing
    av.open = _guarded_open


@wraps(_PYAV_OPEN)
def _guarded_open(file: Any, mode: str | None = None, *args: Any, **kwargs: Any) -> Any:
    if mode in (None, "r"):
        kwargs["container_options"] = {**(kwargs.get("container_options") or {}), **_OPTIONS}
    return _PYAV_OPEN(file, mode, *args, **kwargs)

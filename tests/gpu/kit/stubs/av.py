"""Stands in for PyAV, which only films and sounds need; it would take 35 MB."""

from typing import NoReturn


class FFmpegError(Exception):
    pass


class error:
    FFmpegError = FFmpegError


codecs_available: frozenset[str] = frozenset()


def open(*args: object, **kwargs: object) -> NoReturn:
    raise FFmpegError("the kit has no PyAV: films and sounds can't be decoded")


class AudioFrame:
    pass


class VideoFrame:
    pass


class AudioResampler:
    __init__ = open

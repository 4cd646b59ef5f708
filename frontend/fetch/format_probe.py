"""Probe which formats this installation decodes, by decoding a small sample of each."""

import base64
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import av
import numpy as np
import soundfile  # type: ignore[import-untyped] # it has no types
from PIL import Image
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO

from common.media.formats import AVIF, IMAGE_FORMATS
from frontend.fetch.content import Content
from frontend.fetch.decoders import decode
from frontend.media_limits import FetchPolicy, MediaError

PICTURE, SOUND, FILM = "pictures", "sounds", "films"

_RATE: Final = 48_000
_SIDE: Final = 64
_FRAMES: Final = 16

Make = Callable[[], bytes]


@dataclass(frozen=True)
class ProbedFormat:
    """Result of one probe: ``problem`` is empty if the sample is decoded; ``tried`` is False if the
    encoder for a sample is missing.
    """

    kind: str
    name: str
    problem: str = ""
    tried: bool = True

    @property
    def works(self) -> bool:
        return self.tried and not self.problem


def probe_formats(policy: FetchPolicy) -> Iterator[ProbedFormat]:
    """Probe all formats with the decoders of requests. Takes a second; call ``limit_decoders``
    first.
    """
    for kind, (media_io, samples) in _kinds().items():
        for name, make in samples.items():
            yield _probe(kind, name, make, media_io, policy)


def _probe(
    kind: str, name: str, make: Make, media_io: MediaIO[Any], policy: FetchPolicy
) -> ProbedFormat:
    try:
        sample = make()
    except (ValueError, OSError, KeyError, av.error.FFmpegError, soundfile.LibsndfileError):
        return ProbedFormat(kind, name, tried=False)
    try:
        decode(Content.of(sample), media_io, policy, lambda _: None)
    except MediaError as error:
        return ProbedFormat(kind, name, error.reason)
    except ValueError as error:
        return ProbedFormat(kind, name, str(error))
    return ProbedFormat(kind, name)


def _kinds() -> Mapping[str, tuple[MediaIO[Any], Mapping[str, Make]]]:
    image_io = ImageMediaIO()
    pictures = {name: partial(_picture, name) for name in IMAGE_FORMATS}
    return {
        PICTURE: (image_io, pictures),
        SOUND: (AudioMediaIO(), _SOUNDS),
        FILM: (VideoMediaIO(image_io, num_frames=2), _FILMS),
    }


def _picture(name: str) -> bytes:
    if name == AVIF:  # an encoder may take minutes, or be missing
        return base64.b64decode(_AVIF)
    buffer = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), "red").save(buffer, name)
    return buffer.getvalue()


def _by_libsndfile(container: str, encoding: str) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, _tone(), _RATE, format=container, subtype=encoding)
    return buffer.getvalue()


def _by_ffmpeg(container: str, codec: str, rate: int = _RATE) -> bytes:
    buffer = io.BytesIO()
    whole = av.AudioFrame.from_ndarray(_tone()[None], format="fltp", layout="mono")
    whole.sample_rate, whole.pts = _RATE, 0
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        assert isinstance(stream, av.AudioStream)
        pieces = av.AudioResampler(
            format=stream.format.name, layout="mono", rate=rate, frame_size=stream.frame_size
        )
        for frame in [*pieces.resample(whole), *pieces.resample(None)]:
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def _tone() -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.sin(np.arange(_RATE // 4) / 20) / 2).astype(np.float32)


def _film(container: str, codec: str, pixels: str = "yuv420p") -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=25)
        assert isinstance(stream, av.VideoStream)
        stream.width = stream.height = _SIDE
        stream.pix_fmt = pixels
        for n in range(_FRAMES):
            grey = np.full((_SIDE, _SIDE, 3), 10 * n, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


_AVIF: Final = (
    "AAAAIGZ0eXBhdmlmAAAAAGF2aWZtaWYxbWlhZk1BMUIAAADrbWV0YQAAAAAAAAAhaGRscgAAAAAAAAAAcGljdAAAAAAA"
    "AAAAAAAAAAAAAAAOcGl0bQAAAAAAAQAAAB5pbG9jAAAAAEQAAAEAAQAAAAEAAAETAAAAMQAAAChpaW5mAAAAAAABAAAA"
    "GmluZmUCAAAAAAEAAGF2MDFDb2xvcgAAAABqaXBycAAAAEtpcGNvAAAAFGlzcGUAAAAAAAAAEAAAABAAAAAQcGl4aQAA"
    "AAADCAgIAAAADGF2MUOBAAwAAAAAE2NvbHJuY2x4AAEADQAGgAAAABdpcG1hAAAAAAAAAAEAAQQBAoMEAAAAOW1kYXQS"
    "AAoJGAz/2iAhoNCAMiIXh4eGIYSSSSZBAAB1hKXQY0TaFXEiv3f/Q9x8/iWZ/JFY"
)
"""A picture of 16 by 16 pixels."""

_SOUNDS: Final[Mapping[str, Make]] = {
    "WAV": partial(_by_libsndfile, "WAV", "PCM_16"),
    "Wave64": partial(_by_libsndfile, "W64", "PCM_16"),
    "AIFF": partial(_by_libsndfile, "AIFF", "PCM_16"),
    "AU": partial(_by_libsndfile, "AU", "PCM_16"),
    "CAF": partial(_by_libsndfile, "CAF", "PCM_16"),
    "FLAC": partial(_by_libsndfile, "FLAC", "PCM_16"),
    "MP3": partial(_by_libsndfile, "MP3", "MPEG_LAYER_III"),
    "Ogg Vorbis": partial(_by_libsndfile, "OGG", "VORBIS"),
    "Ogg Opus": partial(_by_ffmpeg, "ogg", "libopus"),
    "WebM Opus": partial(_by_ffmpeg, "webm", "libopus"),
    "AAC": partial(_by_ffmpeg, "adts", "aac"),
    "M4A": partial(_by_ffmpeg, "ipod", "aac"),
    "AC-3": partial(_by_ffmpeg, "ac3", "ac3"),
    "AMR": partial(_by_ffmpeg, "amr", "libopencore_amrnb", 8_000),
    "WavPack": partial(_by_ffmpeg, "wv", "wavpack"),
}
_FILMS: Final[Mapping[str, Make]] = {
    "MP4 H.264": partial(_film, "mp4", "libx264"),
    "MP4 HEVC": partial(_film, "mp4", "libx265"),
    "MP4 MPEG-4": partial(_film, "mp4", "mpeg4"),
    "WebM VP8": partial(_film, "webm", "libvpx"),
    "WebM VP9": partial(_film, "webm", "libvpx-vp9"),
    "Matroska H.264": partial(_film, "matroska", "libx264"),
    "QuickTime ProRes": partial(_film, "mov", "prores_ks", "yuv422p10le"),
    "QuickTime MJPEG": partial(_film, "mov", "mjpeg", "yuvj420p"),
    "AVI MPEG-4": partial(_film, "avi", "mpeg4"),
    "ASF WMV": partial(_film, "asf", "wmv2"),
    "FLV": partial(_film, "flv", "flv"),
    "MPEG-2": partial(_film, "mpeg", "mpeg2video"),
    "MPEG-TS H.264": partial(_film, "mpegts", "libx264"),
    "MXF MPEG-2": partial(_film, "mxf", "mpeg2video"),
    "IVF VP9": partial(_film, "ivf", "libvpx-vp9"),
    "GIF": partial(_film, "gif", "gif", "rgb8"),
}

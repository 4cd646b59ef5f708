"""Refuse videos whose frames would not fit into memory, before they are decoded.

vLLM limits the size of one frame; a few hundred kilobytes of video can still hold gigabytes of
frames, or claim so many that reading them takes hours.
"""

import time
from collections.abc import Callable, Iterator
from copy import copy
from io import BytesIO
from itertools import islice
from typing import Any, ClassVar, Final

import av
import cv2
import pybase64
from vllm import envs
from vllm.multimodal.media import VideoMediaIO
from vllm.multimodal.video import VideoLoader, VideoSourceMetadata
from vllm.multimodal.video_decoders.opencv import OpenCVVideoBackendMixin

from frontend.fetch.content import Content
from frontend.fetch.picture_limit import picture_pixels
from frontend.media_limits import FetchPolicy, RefusedError

READABLE_FILMS: Final = "H.264, HEVC, VP8 or VP9 in MP4, WebM or Matroska"
"""Codecs that every build of OpenCV decodes, for error messages."""

_TABLE_PIXELS: Final = 100_000_000
"""What FFmpeg's table for the colours of an HDR film counts as: up to 4 s of a core."""

MAX_FRAME_PIXELS: Final = 8192 * 4320
"""Pixels of an 8K frame. A codec keeps up to 17 frames, of up to six bytes a pixel: 67 megapixels
took 3.7 GB for a film of 200 KB."""


def limit_video(
    media_io: VideoMediaIO,
    content: Content,
    policy: FetchPolicy,
    admit: Callable[[int], None],
    admit_frame: Callable[[int], None],
) -> VideoMediaIO:
    """Return a decoder that announces all pixels of a video to ``admit``, and those of one frame to
    ``admit_frame``, before it reads frames.

    For videos that OpenCV decodes, as vLLM does without a GPU, and for sequences of JPEGs.
    ``media_io`` is not changed, since media are decoded again where a batch fails. Raises
    ValueError or OSError if a picture of a sequence is none; errors of both are raised here,
    or by decoding.
    """
    if content.jpeg_frames:
        admit(_sequence_pixels(content.data, media_io.num_frames, policy))
        return media_io
    loader = type(media_io.video_loader)
    limits = {
        "policy": policy,
        "admit": staticmethod(admit),
        "admit_frame": staticmethod(admit_frame),
        "data": content.data,
    }
    limited = copy(media_io)
    limited.video_loader = type("Counting", (_CountingLoader, loader), limits)()
    return limited


def why_unreadable(data: bytes) -> str:
    """Return half a sentence on why OpenCV can't decode a film."""
    try:
        with av.open(BytesIO(data), "r") as file:
            if not file.streams.video:
                return "it has no pictures"
            context: Any = file.streams.video[0].codec_context  # is None without a decoder
    except av.error.FFmpegError:
        return "it can't be opened as a film: it is cut off or damaged"
    codec = "its codec is unknown" if context is None else f"codec {context.codec.canonical_name}"
    return (
        f"none of its frames can be decoded here ({codec}): send {READABLE_FILMS}, with frames of "
        f"at most {min(envs.VLLM_MAX_IMAGE_PIXELS, MAX_FRAME_PIXELS):,} pixels"
    )


def count_frames(timeout_s: float, data: bytes) -> int:
    """Count the frames of a video without a count in its header, without decoding. Raises
    RefusedError if it has none, or on a time-out.
    """
    source = BytesIO(data)
    packets = _opened(source, cv2.CAP_PROP_FORMAT, -1)  # raw packets
    watched = _Watched(packets, 0, time.monotonic() + timeout_s)
    try:
        frames = 0
        while watched.grab():
            frames += 1
    finally:
        packets.release()
    if not frames:
        raise RefusedError("it has no frames that can be counted")
    return frames


def _opened(source: BytesIO, *options: int) -> cv2.VideoCapture:
    """Open a video whose source the caller must keep alive: OpenCV does not."""
    reader = OpenCVVideoBackendMixin.get_cv2_video_api()
    return cv2.VideoCapture(source, reader, list(options))  # type: ignore[call-overload] # any stream


def _sequence_pixels(data: bytes, num_frames: int, policy: FetchPolicy) -> int:
    pixels = 0
    for frame in islice(_frames(data), num_frames if num_frames > 0 else None):
        pixels += picture_pixels(pybase64.b64decode(frame, validate=True), policy)
    return pixels


def _frames(data: bytes) -> Iterator[bytes]:
    # Lazily: the first that is no picture ends it, so a megabyte of commas costs nothing.
    start = 0
    while (comma := data.find(b",", start)) >= 0:
        yield data[start:comma]
        start = comma + 1
    yield data[start:]


_TOO_SHORT: Final = "the model looks at none of its {:,} frames: it is too short"
_MAX_MISSING: Final = 10_000
"""Consecutive unreadable frames, which take a moment."""

_MAX_FRAMES: Final = 1 << 22
"""Frames of a film, 19 hours at 60 a second. Some models look at each before they choose: 375 bytes
that claimed 30 million took 2.7 GB, those that claimed a billion a minute of Python."""


class _CountingLoader(VideoLoader):
    """Judges the number of frames before vLLM chooses some, and pixels before it reads these."""

    policy: ClassVar[FetchPolicy]
    data: ClassVar[bytes]
    admit: ClassVar[Callable[[int], None]]
    admit_frame: ClassVar[Callable[[int], None]]

    @classmethod
    def _prepare_source(cls, source: VideoSourceMetadata) -> VideoSourceMetadata:
        if source.total_frames_num <= 0:  # vLLM 0.33 has counted
            frames, fps = count_frames(cls.policy.decode_timeout_s, cls.data), source.original_fps
            source = VideoSourceMetadata(frames, fps, frames / fps if fps > 0 else 0)
        if source.total_frames_num > _MAX_FRAMES:
            raise RefusedError(
                f"it says that it has {source.total_frames_num:,} frames: at most "
                f"{_MAX_FRAMES:,} are taken"
            )
        prepared: VideoSourceMetadata = super()._prepare_source(source)
        return prepared

    @classmethod
    def compute_frames_index_to_sample(
        cls, source: VideoSourceMetadata, *args: Any, **kwargs: Any
    ) -> list[int]:
        try:
            chosen: list[int] = super().compute_frames_index_to_sample(source, *args, **kwargs)
        except ZeroDivisionError as error:  # a sampler of an even number, asked for one frame
            raise RefusedError(_TOO_SHORT.format(source.total_frames_num)) from error
        return chosen

    @classmethod
    def read_frames(cls, cap: Any, frame_idx: list[int], *args: Any, **kwargs: Any) -> Any:
        if not frame_idx:
            frames = int(cap.get(cv2.CAP_PROP_FRAME_COUNT))
            raise RefusedError(_TOO_SHORT.format(frames))
        size = cap.get(cv2.CAP_PROP_FRAME_WIDTH) * cap.get(cv2.CAP_PROP_FRAME_HEIGHT)
        cls.admit(int(size) * len(frame_idx) + _TABLE_PIXELS * cap.maps_colours())
        cls.admit_frame(int(size))
        deadline = time.monotonic() + cls.policy.decode_timeout_s
        watched = _Watched(cap, int(size), deadline)
        frames, valid = super().read_frames(watched, frame_idx, *args, **kwargs)
        if not valid:
            # vLLM has sought the end of the film, from which OpenCV does not return if there is one
            # frame, or in MPEG-TS.
            source = BytesIO(cls.data)
            again = _opened(source)
            watched = _Watched(again, int(size), deadline)
            try:
                frames, valid = super().read_frames(watched, frame_idx, *args, **kwargs)
            finally:
                again.release()
        if not valid:
            raise RefusedError(why_unreadable(cls.data))
        return frames, valid


class _Watched:
    """A video whose frames must have the announced size and be read in time: OpenCV decodes every
    frame up to the last wanted one, and a header may claim billions.
    """

    def __init__(self, cap: cv2.VideoCapture, pixels: int, deadline: float) -> None:
        self._cap = cap
        self._pixels = pixels
        self._deadline = deadline
        self._missing = 0

    def grab(self) -> bool:
        self._check_time()
        good = self._cap.grab()
        self._missing = 0 if good else self._missing + 1
        if self._missing > _MAX_MISSING:
            raise RefusedError("it has far fewer frames than it says")
        return good

    def retrieve(self) -> tuple[bool, Any]:
        return self._checked(*self._cap.retrieve())

    def read(self) -> tuple[bool, Any]:
        self._check_time()
        return self._checked(*self._cap.read())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cap, name)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise RefusedError("its frames can't be read in time")

    def _checked(self, good: bool, frame: Any) -> tuple[bool, Any]:
        if good and frame is not None and frame.shape[0] * frame.shape[1] > self._pixels:
            raise RefusedError("its frames are larger than it says")
        return good, frame

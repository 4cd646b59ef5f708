"""Refusing videos whose frames would not fit into memory, before they are decoded.

vLLM limits the size of one frame; a few hundred kilobytes of video can still hold
gigabytes of frames.
"""

from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from typing import Any, ClassVar

import cv2
import pybase64
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import VideoLoader

from frontend.fetch.content import Content
from frontend.fetch.errors import RefusedError


def limit_video(media_io: MediaIO[Any], content: Content, max_pixels: int) -> None:
    """Make decoding of a video stop before its frames take more than so many pixels.

    For videos that OpenCV decodes, which is what vLLM does without a GPU, and for
    sequences of JPEGs. Other media are left alone.

    Raises:
        RefusedError: the sequence has more; for OpenCV, decoding will raise it.
        ValueError, OSError: a picture of the sequence is none.
    """
    if not isinstance(media_io, VideoMediaIO):
        return
    if content.jpeg_frames:
        _check_sequence(content.data, media_io.num_frames, max_pixels)
    else:
        loader = type(media_io.video_loader)
        counting = type("Counting", (_CountingLoader, loader), {"max_pixels": max_pixels})
        media_io.video_loader = counting()


def _check_sequence(data: bytes, num_frames: int, max_pixels: int) -> None:
    pixels = 0
    for frame in islice(_frames(data), num_frames if num_frames > 0 else None):
        with open_image(BytesIO(pybase64.b64decode(frame, validate=True))) as image:
            pixels += image.width * image.height
        _check(pixels, max_pixels)


def _frames(data: bytes) -> Iterator[bytes]:
    # One by one: the first that is no picture ends it, so a megabyte of commas costs nothing.
    start = 0
    while (comma := data.find(b",", start)) >= 0:
        yield data[start:comma]
        start = comma + 1
    yield data[start:]


class _CountingLoader(VideoLoader):
    """Counts pixels where vLLM has chosen the frames and is about to read them."""

    max_pixels: ClassVar[int]

    @classmethod
    def read_frames(
        cls, cap: cv2.VideoCapture, frame_idx: list[int], *args: Any, **kwargs: Any
    ) -> Any:
        size = cap.get(cv2.CAP_PROP_FRAME_WIDTH) * cap.get(cv2.CAP_PROP_FRAME_HEIGHT)
        _check(int(size) * len(frame_idx), cls.max_pixels)
        return super().read_frames(cap, frame_idx, *args, **kwargs)


def _check(pixels: int, max_pixels: int) -> None:
    if pixels > max_pixels:
        raise RefusedError(
            f"its frames together have more than {max_pixels} pixels, which is too many"
        )

"""Decode by vLLM's own code, with limits before it and clear errors after it.

Everything here blocks: it runs in vLLM's pool for loading media.
"""

import pickle
import struct
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any, Final

import cv2
import numpy as np
import torch
from PIL import Image
from vllm import envs
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO
from vllm.multimodal.media.audio import load_audio

from common.media.container_tables import fault_of
from common.media.decoder_guard import guard_decoders, limit_frames
from common.media.formats import IMAGE_FORMATS, is_known_container, name_of, name_of_unread
from common.media.picture_metadata import MetadataError
from common.vllm_compat.features import count_frames_with
from frontend.fetch.content import Content
from frontend.fetch.picture_limit import picture_pixels, said_by_pillow, too_many_pixels
from frontend.fetch.processor_memory import limit_processors
from frontend.fetch.sound_limit import (
    PROCESSOR_RATE,
    READABLE_SOUNDS,
    SLACK,
    processed_bytes,
    sound_size,
)
from frontend.fetch.video_limit import (
    MAX_FRAME_PIXELS,
    READABLE_FILMS,
    count_frames,
    limit_video,
    why_unreadable,
)
from frontend.media_limits import FetchPolicy, RefusedError

PIXEL_BYTES = 4
"""Bytes that count as one pixel: Pillow's use for most pictures."""

_SMALL_FRAME: Final = 4096 * 4096
"""Pixels, which take a decoder some 25 MB: such films are opened, and refused by vLLM with their
size."""

_LOUDEST: Final = 65_504
"""The largest float16. Floats on the scale of 16-bit integers are below it, resampled too."""

NOT_OPENED: Final = "Could not open video stream"
"""vLLM's error for every film that OpenCV can't open."""

_TEXT_LIMIT: Final = "MAX_TEXT_"
"""In Pillow's errors about a PNG whose metadata, unpacked, exceed a constant of its own."""

_DAMAGE: Final = "decoder error"
"""In Pillow's errors about a damaged TIFF."""

_DAMAGED: Final = "it can't be decoded: it is damaged, or too short"

MISLED_DECODER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    cv2.error,
    pickle.UnpicklingError,
    struct.error,
    zlib.error,
)
"""Errors besides ValueError that readers of Pillow, OpenCV and PyTorch raise for malicious files.
vLLM would answer these with a 500."""


class SpeechIO(AudioMediaIO):
    """Decodes as vLLM's routes for speech do.

    Attributes:
        load: decodes a sound; gets its bytes and the maximum of decoded and resampled bytes.
    """

    def __init__(self, load: Callable[[bytes, int], Any]) -> None:
        super().__init__()
        self.load = load


def limit_decoders(policy: FetchPolicy) -> None:
    """Limit decoders (picture size, formats, time to count frames) and processors (memory), for the
    whole process.

    Pillow and vLLM compare a file's header before they decode; Pillow also does so for pictures
    inside of icons and other containers.
    """
    guard_decoders()
    limit_processors(policy)
    limit_frames(min(max(policy.max_pixels, _SMALL_FRAME), MAX_FRAME_PIXELS))
    count_frames_with(partial(count_frames, policy.decode_timeout_s))
    envs.VLLM_MAX_IMAGE_PIXELS = policy.max_pixels
    Image.MAX_IMAGE_PIXELS = (policy.max_pixels + 1) // 2  # it refuses twice as much
    # vLLM's resampler switches it off, and back as it was, for all threads: of two sounds at a time
    # one would be resampled to other bits, or it would stay off.
    torch.backends.mkldnn.set_flags(False)
    # They are a medium's sender's doing, and Python keeps each text for good.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def _ignore(frame_pixels: int) -> None:
    pass


def decode(
    content: Content,
    media_io: MediaIO[Any],
    policy: FetchPolicy,
    admit: Callable[[int], None],
    admit_frame: Callable[[int], None] = _ignore,
) -> Any:
    """Decode a medium. ``admit`` gets its pixels before it is decoded, ``admit_frame`` those of one
    frame of a film, of which its codec keeps many; their errors are raised here.

    Raises:
        RefusedError: its format is not allowed, its pixels are too many, or decoders fail on it.
        ValueError: it can't be decoded; vLLM's sentence, which becomes a 400.
    """
    try:
        return _decode(content, media_io, policy, admit, admit_frame)
    except Image.DecompressionBombError as error:
        raise too_many_pixels(policy, said_by_pillow(error)) from error
    except MemoryError as error:
        raise RefusedError("it is too large to decode") from error
    except MetadataError as error:
        raise RefusedError(str(error)) from error
    except ValueError as error:
        if _TEXT_LIMIT in str(error):
            raise RefusedError(
                "its text or colour profile is too large: leave it out, or send JPEG"
            ) from error
        if _DAMAGE in str(error):
            raise RefusedError(_DAMAGED) from error
        raise
    except MISLED_DECODER_ERRORS as error:
        raise RefusedError(_DAMAGED) from error


def _decode(
    content: Content,
    media_io: MediaIO[Any],
    policy: FetchPolicy,
    admit: Callable[[int], None],
    admit_frame: Callable[[int], None],
) -> Any:
    data = content.data
    is_picture = isinstance(media_io, ImageMediaIO)
    unread = name_of_unread(data)
    if unread is not None and not (is_picture and unread in IMAGE_FORMATS):
        raise RefusedError(f"it is {unread}, which is not read here: {_advice(media_io)}")
    if is_picture:
        admit(picture_pixels(data, policy))
    elif isinstance(media_io, (AudioMediaIO, VideoMediaIO)) and not content.jpeg_frames:
        if not is_known_container(data):
            raise RefusedError(_unread(data))
        if fault := fault_of(data):
            raise RefusedError(f"it {fault}")
        if isinstance(media_io, AudioMediaIO):
            return _decode_sound(data, media_io, admit)
    if isinstance(media_io, VideoMediaIO):
        media_io = limit_video(media_io, content, policy, admit, admit_frame)
    if content.jpeg_frames:
        return media_io.load_base64("video/jpeg", data.decode())
    try:
        return media_io.load_bytes(data)
    except ValueError as error:
        if str(error) == NOT_OPENED:
            raise RefusedError(why_unreadable(data)) from error
        raise


def _advice(media_io: MediaIO[Any]) -> str:
    if isinstance(media_io, AudioMediaIO):
        return f"send {READABLE_SOUNDS}"
    return f"send {READABLE_FILMS}" if isinstance(media_io, VideoMediaIO) else "send JPEG or PNG"


def _unread(data: bytes) -> str:
    name = name_of(data)
    known = "it begins like none of the formats that are read"
    return known if name is None else f"{known}: it is {name}"


def _decode_sound(data: bytes, media_io: AudioMediaIO, admit: Callable[[int], None]) -> Any:
    """Decode as ``media_io`` does, but no more bytes than admitted."""
    if media_io.audio_backend == "torchcodec":
        raise RefusedError("TorchCodec is not used here, since it takes no orders what to open")
    media_io._validate_encoded_size(len(data))
    size = sound_size(data)
    admit(-(-size.processed // PIXEL_BYTES))
    if isinstance(media_io, SpeechIO):
        pieces, seconds = media_io.load(data, size.processed + SLACK)
        for piece in pieces:
            _check_samples(piece)
        return pieces, seconds
    samples, rate = load_audio(
        BytesIO(data),
        sr=None,
        max_duration_s=envs.VLLM_MAX_AUDIO_DECODE_DURATION_S,
        max_decode_bytes=min(size.decoded + SLACK, envs.VLLM_MAX_AUDIO_DECODE_BYTES),
        backend=media_io.audio_backend,
    )
    if not samples.size:  # the resampler would break on it
        raise RefusedError("it has no samples")
    # At a low rate a little more decoded is much more resampled.
    slack = processed_bytes(SLACK, PROCESSOR_RATE)
    if rate <= 0 or processed_bytes(samples.nbytes, rate) > size.processed + slack:
        raise RefusedError("it is longer than it says")
    _check_samples(samples)
    return samples, rate


def _check_samples(samples: np.ndarray) -> None:
    """Refuse samples of which encoders make NaN. NaN stay in an engine's KV cache, and spoil the
    answer to the next request that gets their blocks.
    """
    if samples.size and not (samples.min() >= -_LOUDEST and samples.max() <= _LOUDEST):
        raise RefusedError(
            f"it has samples that are no numbers, or beyond {_LOUDEST:,}: they lie between -1 and 1"
        )

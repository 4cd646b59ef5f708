"""Decoding, by vLLM's own code, with limits before it and clear errors after it.

Everything here blocks: it runs in vLLM's pool for loading media.
"""

import pickle
import struct
import warnings
import zlib
from typing import Any

import cv2
from PIL import Image
from vllm import envs
from vllm.multimodal.media import MediaIO

from frontend.fetch.content import Content
from frontend.fetch.errors import RefusedError
from frontend.fetch.policy import FetchPolicy
from frontend.fetch.video_limit import limit_video

LED_ASTRAY = (
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
"""What Pillow's, OpenCV's and PyTorch's readers raise, beside ValueError, when a file that
somebody else made up leads them astray. vLLM would answer these with a 500."""


def limit_decoders(policy: FetchPolicy) -> None:
    """Tell Pillow and vLLM the largest picture, for the whole process.

    Both compare what a file's header says, before they decode; Pillow also does it for
    pictures inside of icons and other containers.
    """
    envs.VLLM_MAX_IMAGE_PIXELS = policy.max_pixels
    Image.MAX_IMAGE_PIXELS = (policy.max_pixels + 1) // 2  # it refuses twice as much
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def decode(content: Content, media_io: MediaIO[Any], policy: FetchPolicy) -> Any:
    """Decode a medium.

    Raises:
        RefusedError: its pixels are too many, or decoders break on it.
        ValueError: it can't be decoded; vLLM's sentence, which becomes a 400.
    """
    try:
        limit_video(media_io, content, policy.max_video_pixels)
        if content.jpeg_frames:
            return media_io.load_base64("video/jpeg", content.data.decode())
        return media_io.load_bytes(content.data)
    except Image.DecompressionBombError as error:
        raise RefusedError(
            f"it has more than {policy.max_pixels} pixels, which is too large"
        ) from error
    except MemoryError as error:
        raise RefusedError("it is too large to decode") from error
    except LED_ASTRAY as error:
        raise RefusedError(f"it can't be decoded ({type(error).__name__})") from error

"""What can be said of a picture without decoding it: its hash, and what its tokens depend on.

vLLM makes the hash of a picture of the bytes as they came, if decoding changes nothing but their
form. How many tokens it takes, and which, most models derive from its size.
"""

import struct
from collections.abc import Hashable
from dataclasses import dataclass
from io import BytesIO
from typing import Final

from PIL import ExifTags, Image
from vllm.multimodal.image import open_image
from vllm.multimodal.media import ImageMediaIO, MediaWithBytes
from vllm.multimodal.processing import BaseMultiModalProcessor

from common.cache_partition import Partition, hash_within
from common.identity import MmHash
from frontend.fetch import MISLED_DECODER_ERRORS, decoding_mode, freeze, picture_pixels
from frontend.media_limits import FetchPolicy, RefusedError
from frontend.processing.batch import MediaOptions, Medium, Processor, inputs_of, may_defer

_FORMATS: Final = frozenset({"JPEG", "PNG", "WEBP"})
"""What pictures on the web are. Of these Pillow says size and orientation before it decodes."""

_MODE: Final = "RGB"
"""vLLM converts pictures of other modes, and makes that part of their hashes."""

NUMBERING: Final = "_recompute_cached_prompt_update"
"""What models of vLLM's have of their own that say in a prompt which of its pictures one is."""

_PNG_START: Final = 8
_PNG_SAYS_MORE: Final = frozenset({b"acTL", b"eXIf", b"iTXt", b"tEXt", b"zTXt"})
"""Chunks with frames of an animation, or in which an orientation may stand: Pillow finds those
behind the pixels when it has decoded these."""


@dataclass(frozen=True)
class Outline:
    """A picture that was not decoded.

    Attributes:
        mm_hash: what vLLM's processor would say, within the picture's partition.
        shape: equal for pictures of one size that are decoded and processed alike.
        pixels: of it.
    """

    mm_hash: MmHash
    shape: Hashable
    pixels: int


def outlines(processor: Processor) -> bool:
    """Whether a model's pictures may be put into prompts by their outlines.

    Not if pictures of a prompt must be decoded first, nor if what stands for one depends on which
    of them it is.
    """
    numbers = getattr(type(processor), NUMBERING) is not getattr(BaseMultiModalProcessor, NUMBERING)
    encodes = processor.info.ctx.model_config.is_encoder_decoder
    return may_defer(processor) and not (numbers or encodes)


def outline(
    processor: Processor,
    medium: Medium,
    options: MediaOptions,
    partition: Partition,
    policy: FetchPolicy,
) -> Outline | None:
    """A fraction of a millisecond, and more for each megabyte: not on the event loop.

    Args:
        partition: of the picture.

    Returns:
        None if it has to be decoded to say it, or if it is no good, as who decodes it will say.
    """
    try:
        return _outline(processor, medium, options, partition, policy)
    except (ValueError, RefusedError, Image.DecompressionBombError, *MISLED_DECODER_ERRORS):
        return None


def _outline(
    processor: Processor,
    medium: Medium,
    options: MediaOptions,
    partition: Partition,
    policy: FetchPolicy,
) -> Outline | None:
    media_io, data = medium.media_io, medium.content.data
    mode, frozen = decoding_mode(media_io), freeze([*options])
    if type(media_io) is not ImageMediaIO or mode is None or frozen is None:
        return None
    pixels = picture_pixels(data, policy)
    with open_image(BytesIO(data)) as opened:
        if opened.format not in _FORMATS or getattr(opened, "is_animated", False):
            return None
        if opened.mode != _MODE or media_io.image_mode not in (None, _MODE):
            return None
        if opened.format == "PNG":
            if _png_says_more(data):
                return None
            opened.info["exif"] = b""  # as it will find; else it would decode to look for it
        orientation = opened.getexif().get(ExifTags.Base.Orientation, 1)
        shape = (opened.format, opened.size, orientation, mode, frozen)
        inputs = inputs_of(processor, "image", [MediaWithBytes(opened, data)], options)
        # Not by the processor's method: what stands in its place serves one prompt at a time.
        config = processor.info.ctx.get_mm_config()
        hashes = inputs.get_mm_hashes(processor.info.model_id, config.mm_hasher_algorithm)
    return Outline(hash_within(MmHash(hashes["image"][0]), partition), shape, pixels)


def _png_says_more(data: bytes) -> bool:
    at = _PNG_START
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind in _PNG_SAYS_MORE:
            return True
        at += length + 12
    return False

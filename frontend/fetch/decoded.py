"""Weights and private copies of decoded media.

Model code may change pictures and arrays, so cached or shared ones are never handed out.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm.multimodal.media import MediaWithBytes

from frontend.fetch.decoders import PIXEL_BYTES
from frontend.fetch.picture_limit import stored_pixels
from frontend.fetch.sound_limit import processed_bytes
from frontend.media_limits import seconds_for

_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2}
"""Bytes per pixel in Pillow, by image mode; four for every other."""


def weight(value: object) -> int | None:
    """Return the bytes of a decoded medium, encoded bytes aside; None if unknown."""
    if isinstance(value, MediaWithBytes):
        return weight(value.media)
    if isinstance(value, Image.Image):
        return stored_pixels(value) * _PIXEL_BYTES.get(value.mode, 4)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, torch.Tensor):
        # A copy of a device tensor would take the device's scarce memory.
        return value.nbytes if value.device.type == "cpu" else None
    if isinstance(value, tuple):
        weights = [weight(part) for part in value]
        return None if None in weights else sum(part or 0 for part in weights)
    if value is None or isinstance(value, (bool, int, float, str, bytes, dict, list)):
        return 0  # sampling rates and a video's metadata
    return None


def processing_weight(value: object) -> int:
    """Return the bytes of a medium in a model's processor: a sound with its copies."""
    match value:
        case (np.ndarray() as samples, int() | float() as rate) if rate > 0:
            return processed_bytes(samples.nbytes, rate)
    return weight(value) or 0


def seconds_to_process(media: object) -> float:
    """Return the extra time of a processor for decoded media, beyond its time limit."""
    if isinstance(media, (list, dict)):
        parts = media.values() if isinstance(media, dict) else media
        return sum(map(seconds_to_process, parts))
    return seconds_for(processing_weight(media) / PIXEL_BYTES)


def holder(value: Any) -> Any:
    """Return the part of a decoded medium that lives as long as its pixels."""
    if isinstance(value, MediaWithBytes):
        return holder(value.media)
    if isinstance(value, (tuple, list)) and value:
        return holder(value[0])
    if isinstance(value, np.ndarray) and value.base is not None:
        return holder(value.base)  # of the pieces of a sound each holds all
    if isinstance(value, memoryview):
        return holder(value.obj)
    return value


def own_copy(value: Any) -> Any:
    """Return an equal medium that shares no mutable part: about 0.3 ms per megapixel."""
    if isinstance(value, MediaWithBytes):
        return MediaWithBytes(
            own_copy(value.media), value.original_bytes, own_copy(value.io_config)
        )
    if isinstance(value, (Image.Image, np.ndarray)):
        return value.copy()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (tuple, list)):
        return type(value)(own_copy(part) for part in value)
    if isinstance(value, dict):
        return {key: own_copy(part) for key, part in value.items()}
    return value

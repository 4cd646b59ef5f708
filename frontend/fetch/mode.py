"""Key of how a medium is decoded: equal keys, equal results.

The way is all that vLLM's ``MediaIO`` object was made with: image mode, background
colour, frames to sample, and whatever ``media_io_kwargs`` say.
"""

from collections.abc import Hashable, Mapping
from typing import Any, Final, NewType

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MediaIO
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

Mode = NewType("Mode", tuple[Hashable, ...])

_LONGEST_NAME: Final = 80
"""Characters of what a request calls a decoder, in a sentence about it."""


class _NoKeyError(Exception):
    pass


def decoding_mode(media_io: MediaIO[Any]) -> Mode | None:
    """The key of a ``MediaIO``, None if it holds something that can't be compared."""
    try:
        return Mode((_frozen(media_io),))
    except _NoKeyError:
        return None


def freeze(value: object) -> Hashable | None:
    """A key for what requests say in JSON, None if it holds something that has none."""
    try:
        return _frozen(value)
    except _NoKeyError:
        return None


def _frozen(value: object) -> Hashable:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    # With their types: 1, 1.0 and True are equal, but need not decode alike.
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return (name, value)
    if isinstance(value, (list, tuple)):
        return (name, tuple(_frozen(item) for item in value))
    if isinstance(value, Mapping):
        pairs = [(_frozen(key), _frozen(item)) for key, item in value.items()]
        return (name, frozenset(pairs))
    if isinstance(value, (MediaIO, VideoLoader)):
        return (name, _frozen(vars(value)))
    raise _NoKeyError


def check_video_backend(media_io_kwargs: Mapping[str, Mapping[str, object]]) -> None:
    """Refuse a decoder of videos that there is not, for which vLLM's server has a 500.

    Args:
        media_io_kwargs: of a request, by modality.

    Raises:
        VLLMValidationError: a 400.
    """
    name = media_io_kwargs.get("video", {}).get("video_backend")
    if name and name not in list(VIDEO_LOADER_REGISTRY.name2class):
        shown = str(name)[:_LONGEST_NAME]
        raise VLLMValidationError(f"media_io_kwargs: there is no video_backend {shown!r}")

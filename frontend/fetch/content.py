"""Encoded media: bytes with a digest, keys of decoding options, and media not yet decoded.

The origin of the bytes plays no part: a picture is the same by URL, data URL or file.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, NewType, Self

from blake3 import blake3
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MediaIO
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

from common.media.cache_partition import SHARED, Partition

Digest = NewType("Digest", bytes)

Mode = NewType("Mode", tuple[Hashable, ...])

_MAX_NAME_LEN: Final = 80
"""Limit of a decoder's name in an error."""


@dataclass(frozen=True)
class Content:
    """Encoded bytes.

    Attributes:
        digest: BLAKE3 of the bytes, of ``jpeg_frames`` and of the partition.
        jpeg_frames: the bytes are vLLM's ``video/jpeg``: comma-separated pictures in base64.
    """

    data: bytes = field(repr=False)
    digest: Digest
    jpeg_frames: bool = False

    @classmethod
    def of(cls, data: bytes, *, jpeg_frames: bool = False) -> Self:
        """Digest bytes: about 1 ms per megabyte or two, so not on the event loop."""
        hasher = blake3(b"jpeg frames" if jpeg_frames else b"medium")
        hasher.update(data)
        return cls(data, Digest(hasher.digest()), jpeg_frames)

    @classmethod
    def joined(cls, chunks: Sequence[bytes]) -> Self:
        return cls.of(chunks[0] if len(chunks) == 1 else b"".join(chunks))

    def within(self, partition: Partition) -> Self:
        """Return the same bytes under a digest of that partition. Call once."""
        if partition == SHARED:
            return self
        hasher = blake3(f"partition {partition} ".encode())
        hasher.update(self.digest)
        return replace(self, digest=Digest(hasher.digest()))


class _NoKeyError(Exception):
    pass


def decoding_mode(media_io: MediaIO[Any]) -> Mode | None:
    """Return the key of a ``MediaIO``, None if it holds an incomparable value."""
    try:
        return Mode((_frozen(media_io),))
    except _NoKeyError:
        return None


def freeze(value: object) -> Hashable | None:
    """Return a key for JSON options, None if they hold an incomparable value."""
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
    """Raise VLLMValidationError (400) for an unknown video decoder, for which vLLM's server has a
    500.
    """
    name = media_io_kwargs.get("video", {}).get("video_backend")
    if name and name not in list(VIDEO_LOADER_REGISTRY.name2class):
        shown = str(name)[:_MAX_NAME_LEN]
        raise VLLMValidationError(f"media_io_kwargs: there is no video_backend {shown!r}")


@dataclass(frozen=True, eq=False)
class DeferredMedium:
    """Encoded bytes and their decoder, with the request's options; ``place`` is for errors.

    ``size`` is what vLLM counts of a picture of decisions; the request's allowance counts pixels.
    """

    content: Content
    media_io: MediaIO[Any]
    place: str
    size: ClassVar = (0, 0)


@dataclass(frozen=True, eq=False)
class PendingMedium:
    """A medium not yet fetched, because vLLM's code can't wait for it."""

    load: Callable[[], Awaitable[Any]]


async def arrived(media: list[Any]) -> list[Any]:
    """Fetch the pending media among these. Raises the errors of fetching."""
    waiting = [index for index, each in enumerate(media) if isinstance(each, PendingMedium)]
    loaded = await asyncio.gather(*(media[index].load() for index in waiting))
    found = dict(zip(waiting, loaded, strict=True))
    return [found.get(index, each) for index, each in enumerate(media)]

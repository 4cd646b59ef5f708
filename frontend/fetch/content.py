"""An encoded medium: its bytes under a digest, the key of how it is decoded, and the forms in which
it waits for that.

Where the bytes came from plays no part: a picture is the same by URL, data URL or file.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NewType, Self

from blake3 import blake3
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MediaIO
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

from common.media.cache_partition import SHARED, Partition

Digest = NewType("Digest", bytes)

Mode = NewType("Mode", tuple[Hashable, ...])

_LONGEST_NAME: Final = 80
"""Characters of what a request calls a decoder, in a sentence about it."""


@dataclass(frozen=True)
class Content:
    """Encoded bytes.

    Attributes:
        data: the bytes.
        digest: BLAKE3 of the bytes, of ``jpeg_frames`` and of the partition.
        jpeg_frames: the bytes are vLLM's ``video/jpeg``: pictures, each in base64, with
            commas between them.
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
        """Digest bytes that came in pieces."""
        return cls.of(chunks[0] if len(chunks) == 1 else b"".join(chunks))

    def within(self, partition: Partition) -> Self:
        """The same bytes under a digest of that partition. To be asked for once."""
        if partition == SHARED:
            return self
        hasher = blake3(f"partition {partition} ".encode())
        hasher.update(self.digest)
        return replace(self, digest=Digest(hasher.digest()))


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


@dataclass(frozen=True, eq=False)
class DeferredMedium:
    """Encoded bytes and how to decode them.

    Attributes:
        content: the bytes.
        media_io: vLLM's decoder, with the request's options in it.
        place: where the medium came from, as an error may say it.
    """

    content: Content
    media_io: MediaIO[Any]
    place: str


@dataclass(frozen=True, eq=False)
class PendingMedium:
    """A medium that nobody has fetched: where vLLM's code can't wait for it.

    Attributes:
        load: fetches it, for the request that the caller works on.
    """

    load: Callable[[], Awaitable[Any]]


async def arrived(media: list[Any]) -> list[Any]:
    """Media with those fetched that were not. Raises what fetching raises."""
    waiting = [index for index, each in enumerate(media) if isinstance(each, PendingMedium)]
    loaded = await asyncio.gather(*(media[index].load() for index in waiting))
    found = dict(zip(waiting, loaded, strict=True))
    return [found.get(index, each) for index, each in enumerate(media)]

"""A medium that was fetched and not decoded.

It stands where vLLM expects a decoded one, until the processing takes it out again. What
was processed before needs no decoding at all, and what was not is decoded where it is
processed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.media import MediaIO

from frontend.fetch.content import Content


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

"""A medium that was fetched and not decoded.

It stands where vLLM expects a decoded one, until the processing takes it out again. What
was processed before needs no decoding at all, and what was not is decoded where it is
processed.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from vllm.multimodal.media import MediaIO

from frontend.fetch.content import Content

deferring: Final[ContextVar[bool | None]] = ContextVar("deferring", default=None)
"""Whether the model of the request that this task works on wants media so; None where there is one
model, whose processing has told the loader."""


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

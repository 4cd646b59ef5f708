"""A medium that was fetched and not decoded.

It stands where vLLM expects a decoded one, until the processing takes it out again. What
was processed before needs no decoding at all, and what was not is decoded where it is
processed.
"""

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

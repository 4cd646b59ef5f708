"""Refusing references where decoded media are expected.

Hugging Face's processors take a string for an address or a path, and fetch or open it, with no
limit. Whatever the route, what a client sends must not come that far.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Final

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MediaWithBytes

_REFERENCES: Final = (str, bytes, bytearray, PathLike)
_CONTAINERS: Final = (list, tuple, dict, MediaWithBytes)
_TEXTS_OF_CHUNKS: Final = frozenset({"type", "uuid", "prompt"})
"""Of what some models have for a medium: a mapping that says what it is."""

_MEDIA_ARGUMENTS: Final = frozenset(
    {
        "audio",
        "audios",
        "image",
        "images",
        "raw_speech",
        "speech",
        "text",
        "text_pair",
        "video",
        "videos",
    }
)
"""Names under which a Hugging Face processor takes media or text."""


def check_decoded(modality: str, media: object) -> None:
    """Refuse media that are references, in any form in which vLLM has them.

    Raises VLLMValidationError: one is a string, bytes or a path; 400.
    """
    if _refers(media):
        raise VLLMValidationError(
            f"{modality} content can't be a reference here: send it as a URL in {modality}_url"
        )


def check_options(options: Mapping[str, object]) -> None:
    """Refuse options of a processor that are media. Raises VLLMValidationError: one is; 400."""
    for name, value in options.items():
        if name in _MEDIA_ARGUMENTS:
            raise VLLMValidationError(f"mm_processor_kwargs: {name} is no option of a processor")
        if isinstance(value, Mapping):
            check_options(value)


def _refers(value: object) -> bool:
    if isinstance(value, MediaWithBytes):
        return _refers(value.media)
    if isinstance(value, _REFERENCES):
        return True
    if isinstance(value, dict):
        return any(_refers(part) for key, part in value.items() if key not in _TEXTS_OF_CHUNKS)
    if not isinstance(value, (list, tuple)):
        return False
    kinds = set(map(type, value))  # at once: a sound may be millions of numbers
    if any(issubclass(kind, _REFERENCES) for kind in kinds):
        return True
    # What stands beside frames says how they were chosen, in words too.
    deeper = (list, tuple, MediaWithBytes) if isinstance(value, tuple) else _CONTAINERS
    return any(issubclass(kind, deeper) for kind in kinds) and any(
        _refers(part) for part in value if isinstance(part, deeper)
    )

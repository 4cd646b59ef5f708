"""What a prompt says of each of its media: shown, or only named."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from frontend.fetch import DeferredMedium, decoding_mode, freeze
from frontend.processing.batch import MediaOptions, Medium, Processed

MediaData: TypeAlias = Mapping[str, Any]
"""vLLM's: for each modality a list of its media, None where one is only named. Embeddings may
be a single tensor instead of a list."""

Place: TypeAlias = tuple[str, int]
"""Of a medium in a prompt: its modality, and which of that."""

ByPlace: TypeAlias = Mapping[Place, Processed]
"""The media of a prompt that are only named, and are kept."""


@dataclass(frozen=True)
class Shown:
    """A medium that comes with its content.

    Attributes:
        key: equal for media that are processed alike.
        modality: vLLM's name of it.
        medium: what to process.
        place: where it came from, as the user may read it.
    """

    key: Hashable
    modality: str
    medium: Medium
    place: str


@dataclass(frozen=True)
class Kept:
    """A medium that is only named.

    Attributes:
        modality: vLLM's name of it.
        processed: what the name stands for.
    """

    modality: str
    processed: Processed


def listed(media: Any) -> list[Any]:
    """The media of a modality one by one; none if it is embeddings in a single tensor."""
    return media if isinstance(media, list) else []


def media_apart(
    mm_data: MediaData, named: ByPlace, options: MediaOptions
) -> list[Shown | Kept] | None:
    """A prompt's media one by one, or None if some of them can't be processed apart.

    That is so for embeddings, and for the sound of a video, which some models process
    together with its pictures.
    """
    if options.mm_processor_kwargs.get("use_audio_in_video"):
        return None
    frozen = freeze([*options])
    found: list[Shown | Kept] = []
    for modality, media in mm_data.items():
        if not listed(media):
            return None
        for index, medium in enumerate(media):
            if (kept := named.get((modality, index))) is not None:
                found.append(Kept(modality, kept))
            elif isinstance(medium, DeferredMedium):
                place = f"{medium.place}, {modality} {index + 1} of {len(media)}"
                found.append(_shown(modality, medium, frozen, place if len(media) > 1 else ""))
            else:
                return None
    return found


def _shown(modality: str, medium: DeferredMedium, options: Hashable | None, place: str) -> Shown:
    content, mode = medium.content, decoding_mode(medium.media_io)
    key: Hashable = (modality, content.digest, mode, options)
    if mode is None or options is None:
        key = object()  # like no other
    return Shown(key, modality, Medium(content, medium.media_io), place or medium.place)

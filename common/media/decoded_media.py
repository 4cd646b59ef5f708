"""Refuse references where decoded media are expected. Hugging Face's processors fetch or open a
string as an address or path, without limits. No route may pass a client's string that far."""

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
        "audio", "audios", "image", "images", "raw_speech", "self", "speech", "text", "text_pair",
        "video", "videos",
    }
)  # fmt: skip
"""Names under which a Hugging Face processor takes media or text."""

_SHAPES: Final = frozenset(
    {
        "chunk_length", "feature_size", "hop_length", "max_length", "merge_size", "n_fft",
        "n_samples", "pad_to_multiple_of", "patch_size", "second_per_grid_ts",
        "temporal_patch_size",
    }
)  # fmt: skip
"""Options that pad media or text to any length, or cut pictures and sounds as no encoder takes
them: ``hop_length`` 1 takes gigabytes for a tenth of a second. ``second_per_grid_ts`` has vLLM make
a list of each two seconds of a film with its sound: a million took 76 s."""

_SCALES: Final = frozenset(
    {
        "dither", "image_mean", "image_std", "mel_floor", "padding_value", "preemphasis",
        "rescale_factor",
    }
)  # fmt: skip
"""Options that scale values: ``image_std`` 0 makes NaN, which could stay in an engine's KV cache
and spoil the answer to the next request there, as those of a sound did."""

_FIXED: Final = _SHAPES | _SCALES

_MAX_OPTION: Final = 1 << 20
_MAX_TILES: Final = 256
"""Of InternVL and its like, which try all shapes of so many tiles in cubic time."""

_LEAST_FPS: Final = 0.01
"""Engines make a list of each two seconds that a film with its sound would last."""

_COUNTED: Final = ("pixels", "edge")
"""Endings of options that may be large: what comes of them is counted before it is made."""


def check_decoded(modality: str, media: object) -> None:
    """Refuse references, in any form in which vLLM holds media. Raises VLLMValidationError (400):
    one is a string, bytes or a path."""
    if _refers(media):
        raise VLLMValidationError(
            f"{modality} content can't be a reference here: send it as a URL in {modality}_url"
        )


def check_options(options: Mapping[str, object]) -> None:
    """Refuse options that are media or unbounded in cost. Raises VLLMValidationError (400)."""
    for name, value in options.items():
        if name in _MEDIA_ARGUMENTS:
            raise VLLMValidationError(f"mm_processor_kwargs: {name} is no option of a processor")
        if name in _FIXED and value is not None:
            raise VLLMValidationError(f"mm_processor_kwargs: {name} can't be set by a request")
        most = _MAX_TILES if name.endswith("dynamic_patch") else _MAX_OPTION
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if not name.endswith(_COUNTED) and any(
            isinstance(each, (int, float)) and not abs(each) <= most for each in numbers
        ):
            raise VLLMValidationError(f"mm_processor_kwargs: {name} may be {most:,} at most")
        if name == "fps" and any(
            isinstance(each, (int, float)) and not each >= _LEAST_FPS for each in numbers
        ):
            raise VLLMValidationError(f"mm_processor_kwargs: fps may be {_LEAST_FPS} at least")
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
    # A tuple's second part describes the frames' selection, in text too.
    deeper = (list, tuple, MediaWithBytes) if isinstance(value, tuple) else _CONTAINERS
    return any(issubclass(kind, deeper) for kind in kinds) and any(
        _refers(part) for part in value if isinstance(part, deeper)
    )

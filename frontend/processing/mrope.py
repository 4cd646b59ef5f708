"""Reject media to which M-RoPE would give positions that end an engine.

Qwen2.5-VL and its relatives give a film's frames positions by their seconds. Engines have a table
of four times the model's positions, and end with an index beyond it: an AVI file of 23 KB, whose
frames last eleven days each, ended one engine after the other.

Qwen3-Omni gives a position to the token after each medium too, which templates always write. A
client's text may name two media side by side: an engine then counts a position more than tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from common.errors import RequestRejectedError

_TABLE: Final = 4
"""Positions in vLLM's table for each of the model's (``MRotaryEmbedding``)."""

_RATES: Final = ("tokens_per_second", "position_id_per_seconds")


def check_media(
    features: Sequence[MultiModalFeatureSpec], tokens: Sequence[int], config: ModelConfig
) -> None:
    """Raise RequestRejectedError for media of a prompt's ``tokens`` that would end an engine."""
    check_films(features, config)
    if features and str(config.hf_text_config.model_type).startswith("qwen3_omni_moe"):
        _check_gaps([each.mm_position for each in features], len(tokens))


def _check_gaps(places: Iterable[PlaceholderRange], length: int) -> None:
    """Raise RequestRejectedError unless a token follows each medium of a prompt."""
    spans = sorted((place.offset, place.offset + place.length) for place in places)
    following = [start for start, _ in spans[1:]] + [length]
    for (start, end), after in zip(spans, following, strict=True):
        if end == after or start < after < end:  # a film's own sound lies where the film does
            raise RequestRejectedError(
                "this model needs a token after each medium: don't write placeholders of media "
                "side by side, or last in a prompt"
            )


def check_films(features: Iterable[MultiModalFeatureSpec], config: ModelConfig) -> None:
    """Raise RequestRejectedError if the films of a prompt have more positions than the model."""
    seconds = sum(_seconds(each.data) for each in features if each.modality == "video")
    if not seconds:
        return
    length, text = config.max_model_len, config.hf_text_config
    known = max(length, getattr(text, "max_position_embeddings", 0))
    # Texts and answers have a position for each token.
    most = (_TABLE * known - length) / _positions_per_second(config.hf_config)
    if not 0 < seconds <= most:  # it may be no number
        raise RequestRejectedError(
            f"the videos of the request last {seconds:,.0f} s, and this model counts {most:,.0f} "
            "s: send shorter ones, or a file that names the right rate of frames"
        )


def _seconds(item: Any) -> float:
    """Return the time between a film's first and last frames; 0 if the model asks for none."""
    if item is None or "second_per_grid_ts" not in item:
        return 0.0
    each = float(item["second_per_grid_ts"].data)
    return each * (int(item["video_grid_thw"].data.flatten()[0]) - 1)


def _positions_per_second(config: Any) -> float:
    """Return the highest rate in a configuration, of which vLLM's models read different parts."""
    thinker = getattr(config, "thinker_config", config)
    parts = (thinker, getattr(thinker, "vision_config", None))
    return max(1.0, *(float(getattr(part, rate, 1.0)) for part in parts for rate in _RATES))

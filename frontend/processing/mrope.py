"""Reject media to which M-RoPE would give positions that end an engine.

Engines compute the positions of a prompt with a function of the model's class, which trusts media
and tokens, and look them up in a table. A film of 23 KB whose frames lie eleven days apart, and a
text that names two media of Qwen3-Omni side by side, ended one engine after the other. So the same
function computes them here first.
"""

import math
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import get_model_cls
from vllm.multimodal.inputs import MultiModalFeatureSpec

from common.errors import RequestRejectedError

_TABLE: Final = 4
"""Times a model's positions that engines have one for (vLLM's ``positions_factor``)."""

_GRID: Final = 256
"""Cells of the grids of a prompt for each token of its context. Four make a token, or more where
films are pruned; a client's own tensors may name any number."""

_OTHERS: Final = "vllm.model_executor.models.transformers"
"""Module of the models that are Transformers', with classes that need their weights."""


class MropePositions:
    """Positions of prompts, as engines of one model will compute them."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._length = config.max_model_len
        known = getattr(config.hf_text_config, "max_position_embeddings", 0)
        self._known = _TABLE * max(self._length, known)

    @cached_property
    def _model(self) -> Any:
        """The model without weights; None if it has no positions that need media."""
        if not self._config.uses_mrope:
            return None
        native = copy(self._config)
        native.model_impl = "auto"
        kind = get_model_cls(native)
        if any(each.__module__.startswith(_OTHERS) for each in kind.__mro__):
            return None
        model: Any = nn.Module.__new__(kind)
        model.config = getattr(native.hf_config, "thinker_config", native.hf_config)
        return model

    def check(self, features: Sequence[MultiModalFeatureSpec], tokens: list[int]) -> None:
        """Raise RequestRejectedError for a prompt whose media an engine can't place."""
        placed = [each for each in features if each.modality != "prompt_embeds"]
        if not placed or self._model is None:
            return
        if sum(map(_cells, placed)) > _GRID * self._length:
            raise RequestRejectedError("the media of the request have too many patches")
        try:
            positions, delta = self._model.get_mrope_input_positions(tokens, placed)
            if (found := positions.shape[-1]) != len(tokens):
                raise ValueError(f"{found} positions for {len(tokens)} tokens")
        except Exception as error:  # of any type: an engine would end with it
            raise RequestRejectedError(
                f"this model can't place the request's media in its prompt ({error}): don't write "
                "placeholders of media in a text, side by side or last"
            ) from error
        # Answers have a position for each token.
        last = delta + self._length
        if int(positions.min()) < 0 or last > self._known:
            raise RequestRejectedError(
                f"the videos of the request last for {last:,} positions with an answer, and this "
                f"model counts {self._known:,}: send shorter ones, or a file that names the right "
                "rate of frames"
            )


def _cells(feature: MultiModalFeatureSpec) -> float:
    """Return the patches that the grids of a medium name; 0 if it has none."""
    return sum(
        math.prod(grid)
        for name, each in (feature.data or {}).items()
        if name.endswith(("_grid_thw", "_grid_hw"))
        for grid in torch.atleast_2d(each.data).tolist()
    )

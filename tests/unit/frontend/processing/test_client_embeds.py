"""Embeddings that don't fit their placeholders never reach an engine."""

from pathlib import Path

import pytest
import torch
from vllm.config import ModelConfig
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from common.errors import RequestRejectedError
from common.vllm_compat.engine_settings import embeds_width
from frontend.processing.client_tensors import check_embeds
from tests.families.makers import MAKERS


def feature(name: str, shape: tuple[int, ...], position: PlaceholderRange) -> MultiModalFeatureSpec:
    element = MultiModalFieldElem(torch.zeros(shape), MultiModalBatchedField())
    return MultiModalFeatureSpec(MultiModalKwargsItem({name: element}), "image", "x", position)


PLAIN = PlaceholderRange(offset=3, length=4)
MASKED = PlaceholderRange(
    offset=3, length=6, is_embed=torch.tensor([True, False, True, True, False, True])
)


@pytest.mark.parametrize("position", [PLAIN, MASKED])
def test_as_many_as_placeholders(position: PlaceholderRange) -> None:
    check_embeds(feature("image_embeds", (4, 8), position), 8)
    check_embeds(feature("image_embeds", (1, 4, 8), position), 8)
    for rows in (0, 3, 5, 6):
        with pytest.raises(RequestRejectedError, match=f"{rows} embeddings for 4"):
            check_embeds(feature("image_embeds", (rows, 8), position), 8)


def test_pixels_are_not_counted() -> None:
    check_embeds(feature("pixel_values", (100, 8), PLAIN), 8)


@pytest.mark.parametrize("shape", [(4, 7), (4, 9), (4,)])
def test_of_the_models_width(shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestRejectedError, match="8"):
        check_embeds(feature("image_embeds", shape, PLAIN), 8)


def test_embeds_that_are_no_numbers_are_refused() -> None:
    sent = feature("image_embeds", (4, 8), PLAIN)
    assert sent.data is not None
    values = sent.data["image_embeds"].data
    assert isinstance(values, torch.Tensor)
    values[1, 2] = torch.inf
    with pytest.raises(RequestRejectedError, match="no numbers"):
        check_embeds(sent, 8)


def test_the_width_of_a_model_whose_encoder_feeds_deeper_layers(tmp_path: Path) -> None:
    MAKERS["qwen3_vl"]().save(tmp_path)
    config = ModelConfig(str(tmp_path), enable_mm_embeds=True)
    width = embeds_width(config, "image")
    assert width == 3 * config.get_inputs_embeds_size() == 3 * embeds_width(config, "audio")

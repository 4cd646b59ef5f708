"""Media whose positions would end an engine never reach one."""

import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from common.errors import RequestRejectedError
from frontend.processing.mrope import check_films, check_media


def film(seconds: float, frames: int = 4, **others: torch.Tensor) -> MultiModalFeatureSpec:
    """A film with ``seconds`` between two of its frames."""
    tensors = {
        "second_per_grid_ts": torch.tensor(seconds),
        "video_grid_thw": torch.tensor([frames, 4, 4]),
        **others,
    }
    item = {
        name: MultiModalFieldElem(each, MultiModalBatchedField()) for name, each in tensors.items()
    }
    return MultiModalFeatureSpec(
        MultiModalKwargsItem(item), "video", "x", PlaceholderRange(0, frames * 4)
    )


def config(length: int = 1000, **others: Any) -> ModelConfig:
    """A model of 1,000 positions, two for each second, whose context is ``length``."""
    hf = SimpleNamespace(vision_config=SimpleNamespace(tokens_per_second=2), **others)
    text = SimpleNamespace(max_position_embeddings=1000)
    return cast(
        ModelConfig, SimpleNamespace(max_model_len=length, hf_config=hf, hf_text_config=text)
    )


def test_as_long_as_the_engines_table() -> None:
    default = inspect.signature(MRotaryEmbedding.__init__).parameters["positions_factor"].default
    assert default == 4  # so that 3,000 positions are left beside 1,000 tokens
    check_films([film(500)], config())
    check_films([film(250), film(250)], config())
    check_films([film(600)], config(length=400))
    check_films([film(5000), film(3000)], config(length=20_000))  # by a longer context


@pytest.mark.parametrize("seconds", [501, 2e6, 1e300, float("inf"), float("nan"), -1])
def test_longer_films_are_refused(seconds: float) -> None:
    with pytest.raises(RequestRejectedError, match="this model counts 1,500 s"):
        check_films([film(seconds)], config())


def test_films_of_a_prompt_are_counted_together() -> None:
    with pytest.raises(RequestRejectedError, match="last 3,000 s"):
        check_films([film(500), film(500)], config())


def test_the_rate_of_the_part_that_has_one() -> None:
    thinker = SimpleNamespace(position_id_per_seconds=25)
    with pytest.raises(RequestRejectedError, match="counts 120 s"):
        check_films([film(500)], config(thinker_config=thinker))


def test_other_media_have_no_time() -> None:
    picture = film(2e6)
    picture.modality = "image"
    check_films([picture, film(2e6, frames=1)], config())
    plain = MultiModalFieldElem(torch.zeros(4), MultiModalBatchedField())
    item = MultiModalKwargsItem({"pixel_values_videos": plain})
    check_films([MultiModalFeatureSpec(item, "video", "x", PlaceholderRange(0, 4))], config())


def places(*spans: tuple[int, int]) -> list[MultiModalFeatureSpec]:
    return [MultiModalFeatureSpec(None, "image", "x", PlaceholderRange(*span)) for span in spans]


@pytest.mark.parametrize("spans", [[(1, 4), (5, 2)], [(5, 2), (1, 4)], [(1, 9)]], ids=str)
def test_a_model_that_counts_the_token_after_each_medium_has_one(
    spans: list[tuple[int, int]],
) -> None:
    def check(kind: str) -> None:
        text = SimpleNamespace(max_position_embeddings=1000, model_type=kind)
        model = SimpleNamespace(max_model_len=1000, hf_config=text, hf_text_config=text)
        check_media(places(*spans), [0] * 10, cast(ModelConfig, model))

    check("qwen2_vl")
    with pytest.raises(RequestRejectedError, match="side by side, or last"):
        check("qwen3_omni_moe_text")


def test_media_apart_and_a_film_with_its_sound() -> None:
    text = SimpleNamespace(max_position_embeddings=1000, model_type="qwen3_omni_moe_text")
    model = SimpleNamespace(max_model_len=1000, hf_config=text, hf_text_config=text)
    for spans in ((1, 3), (5, 4)), ((1, 8), (1, 8)), ((0, 9),):
        check_media(places(*spans), [0] * 10, cast(ModelConfig, model))

"""Media whose positions would end an engine never reach one."""

import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from common.errors import RequestRejectedError
from frontend.processing import mrope
from frontend.processing.mrope import MropePositions

LENGTH = 1000


def medium(modality: str, start: int, length: int, **tensors: Any) -> MultiModalFeatureSpec:
    item = {
        name: MultiModalFieldElem(torch.tensor(each), MultiModalBatchedField())
        for name, each in tensors.items()
    }
    place = PlaceholderRange(start, length)
    return MultiModalFeatureSpec(MultiModalKwargsItem(item), modality, "x", place)


def picture(start: int, height: int = 4) -> MultiModalFeatureSpec:
    """A picture of a token for each two of its patches."""
    return medium("image", start, height // 2, image_grid_thw=[1, height, 2])


def film(seconds: float, frames: int = 4, start: int = 0) -> MultiModalFeatureSpec:
    """A film with ``seconds`` between two of its frames, of a token each."""
    grid = [frames, 2, 2]
    return medium("video", start, frames, video_grid_thw=grid, second_per_grid_ts=seconds)


def positions(
    monkeypatch: pytest.MonkeyPatch,
    kind: type = Qwen2_5_VLForConditionalGeneration,
    length: int = LENGTH,
) -> MropePositions:
    """Those of a model of 1,000 positions, two for each second, whose context is ``length``."""
    monkeypatch.setattr(mrope, "get_model_cls", lambda config: kind)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    hf = SimpleNamespace(vision_config=vision, position_id_per_seconds=2)
    text = SimpleNamespace(max_position_embeddings=1000)
    config = SimpleNamespace(
        max_model_len=length, hf_config=hf, hf_text_config=text, uses_mrope=True
    )
    return MropePositions(cast(ModelConfig, config))


def test_as_long_as_the_engines_table(monkeypatch: pytest.MonkeyPatch) -> None:
    default = inspect.signature(MRotaryEmbedding.__init__).parameters["positions_factor"].default
    assert default == 4  # so that 3,000 positions are left beside 1,000 tokens
    short = positions(monkeypatch)
    short.check([film(500)], [0] * 8)
    short.check([film(250), film(250, start=4)], [0] * 9)
    positions(monkeypatch, length=400).check([film(600)], [0] * 8)
    positions(monkeypatch, length=20_000).check([film(5000)], [0] * 8)  # by a longer context


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("seconds", [501, 2e6, 1e300, float("inf"), float("nan"), -1])
def test_longer_films_are_refused(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    with pytest.raises(RequestRejectedError, match="this model counts 4,000"):
        positions(monkeypatch).check([film(seconds)], [0] * 8)


def test_films_of_a_prompt_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestRejectedError, match="6,994 positions"):
        positions(monkeypatch).check([film(500), film(500, start=4)], [0] * 8)


def test_a_model_that_counts_the_token_after_each_medium_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [[picture(start) for start in starts] for starts in ((1, 3), (3, 1), (6, 8))]
    other = positions(monkeypatch)
    for beside in pairs:
        other.check(beside, [0] * 10)
    omni = positions(monkeypatch, Qwen3OmniMoeThinkerForConditionalGeneration)
    for beside in pairs:
        with pytest.raises(RequestRejectedError, match="side by side or last"):
            omni.check(beside, [0] * 10)
    omni.check([picture(1), picture(4)], [0] * 10)


def test_what_a_models_code_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestRejectedError, match="can't place the request's media"):
        positions(monkeypatch).check([medium("audio", 0, 4)], [0] * 8)


def test_a_clients_grid_is_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestRejectedError, match="too many patches"):
        positions(monkeypatch).check([picture(0, height=1 << 40)], [0] * 8)


def test_texts_and_other_models_have_no_such_media(monkeypatch: pytest.MonkeyPatch) -> None:
    embeds = medium("prompt_embeds", 0, 4)
    positions(monkeypatch).check([embeds], [0] * 8)
    plain = SimpleNamespace(max_model_len=10, hf_config=None, hf_text_config=None, uses_mrope=False)
    MropePositions(cast(ModelConfig, plain)).check([film(2e6)], [0] * 8)

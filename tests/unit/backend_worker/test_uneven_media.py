"""Sounds and films of different shapes are encoded apart by models that take one tensor."""

from types import SimpleNamespace

import torch
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from backend_worker.engine.vllm_faults import uneven_media  # noqa: F401


def batches(name: str) -> list[object]:
    """Return the shapes, or types, of what a model gets for sounds of three lengths."""
    sounds = [
        MultiModalKwargsItem(
            {name: MultiModalFieldElem(torch.zeros(128, length), MultiModalBatchedField())}
        )
        for length in (100, 100, 200, 100)
    ]
    grouped = group_and_batch_mm_kwargs([("audio", each) for each in sounds])
    return [getattr(given[name], "shape", type(given[name])) for _, _, given in grouped]


def test_only_sounds_of_one_length_are_encoded_at_once() -> None:
    alike = [(2, 128, 100), (1, 128, 200), (1, 128, 100)]
    assert batches("whisper_input_features") == alike
    assert batches("audio_feature_lens") == alike
    assert batches("audio_features") == [list]


def test_only_films_of_one_shape_are_encoded_at_once() -> None:
    field, name = MultiModalFlatField(slices=[]), "pixel_values_flat_video"
    films = [
        MultiModalKwargsItem({name: MultiModalFieldElem(torch.zeros(shape), field)})
        for shape in ((2, 3, 32, 64), (2, 3, 32, 64), (2, 3, 32, 32))
    ]
    grouped = group_and_batch_mm_kwargs([("video", each) for each in films])
    assert [given[name].shape for _, _, given in grouped] == [(4, 3, 32, 64), (2, 3, 32, 32)]


def test_the_sounds_of_all_clients_are_put_into_their_prompts() -> None:
    """The second of two tokens of the first sound has no embedding."""
    kind = ModelRegistry.models["MoonshotKimiaForCausalLM"].load_model_cls()
    words = SimpleNamespace(embed_tokens=lambda ids: torch.ones(len(ids), 2))
    model = SimpleNamespace(
        language_model=SimpleNamespace(model=words),
        _parse_and_validate_audio_input=lambda sounds: sounds,
        _process_audio_input=lambda sounds: sounds,
    )
    heard = torch.tensor([True, True, False, True])
    first, second = kind.embed_multimodal(model, sounds=torch.tensor([[[1.0, 1.0]], [[5.0, 5.0]]]))
    embedded = kind.embed_input_ids(
        model, torch.zeros(4), [first[:2], second[:1]], is_multimodal=heard
    )
    assert [round(float(each[0] / 2**0.5), 3) for each in embedded] == [2.0, 0.707, 0.707, 6.0]


def test_pictures_are_put_together_without_their_padding() -> None:
    kind = ModelRegistry.models["Granite4VisionForConditionalGeneration"].load_model_cls()
    model = SimpleNamespace(
        _parse_and_validate_image_input=lambda **media: media | {"type": "pixel_values"},
        _get_all_layer_features=lambda pixels, sizes: (sizes, pixels),
    )
    pictures = [torch.ones(5, 3, 2, 2), torch.ones(3, 3, 2, 2)]
    read = kind.embed_multimodal(model, pixel_values=pictures, image_sizes=torch.zeros(2, 2))
    assert read.shape == (2, 5, 3, 2, 2)
    assert read.sum() == sum(each.sum() for each in pictures)

"""Sounds of different lengths end no engine of a model that takes them as one tensor."""

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from backend_worker.engine import uneven_sounds  # noqa: F401


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
    assert batches("audio_features") == [list]

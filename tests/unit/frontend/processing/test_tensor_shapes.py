"""Options with which one request would end an engine, and options that are as good as any."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs, TimingContext

from common.encoder_width import embeds_width
from common.errors import RequestRejectedError
from common.renderer_patches import check_items
from frontend.processing.batch import Batch, MediaOptions, Processed, process
from frontend.processing.tensor_shapes import check_tensors
from tests.families.makers import MAKERS
from tests.unit.frontend.processing.media import batch_of

Size: TypeAlias = tuple[int, int]
Processor: TypeAlias = BaseMultiModalProcessor[Any]

SIZES: Sequence[Size] = ((29, 31), (30, 100), (224, 56), (300, 400), (1600, 1200))


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Processor]:
    made: dict[str, Processor] = {}

    def of(family: str) -> Processor:
        if family not in made:
            model = tmp_path_factory.mktemp(family)
            MAKERS[family]().save(model)
            made[family] = MULTIMODAL_REGISTRY.create_processor(ModelConfig(str(model)))
            check_items(made[family], check_tensors)
        return made[family]

    return of


def processed(
    processor: Processor, sizes: Sequence[Size], options: Mapping[str, object]
) -> list[Processed]:
    batch = Batch("image", batch_of().media, MediaOptions(options, {}))
    return process(processor, batch, [Image.effect_noise(size, 9).convert("RGB") for size in sizes])


@pytest.mark.parametrize(
    ("family", "options", "sizes", "what"),
    [
        ("llava", {"crop_size": {"height": 1, "width": 1}}, SIZES[:1], "pixel_values"),
        ("llava", {"images_kwargs": {"crop_size": {"height": 140, "width": 140}}}, SIZES, "140"),
        ("llava", {"return_tensors": "np"}, SIZES, "no tensor"),
        ("gemma3", {"size": {"height": 448, "width": 448}}, SIZES, "1x3x448x448"),
        ("gemma3", {"size": 5}, SIZES, "1x3x5x5"),
        ("idefics3", {"do_resize": False}, SIZES[:2], "pixel_"),
        ("idefics3", {"do_resize": False}, [(224, 57)], "3 long, and this model looks for 4"),
        ("idefics3", {"max_image_size": {"longest_edge": 14}}, SIZES[2:3], "pixel_"),
    ],
)
def test_tensors_that_no_encoder_takes_are_refused(
    processors: Callable[[str], Processor],
    family: str,
    options: dict[str, object],
    sizes: Sequence[Size],
    what: str,
) -> None:
    with pytest.raises(RequestRejectedError, match=f"mm_processor_kwargs: .*{what}"):
        processed(processors(family), sizes, options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llava", {"do_normalize": False}),
        ("llava", {"size": {"shortest_edge": 224}}),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}),
        ("idefics3", {"size": {"longest_edge": 112}}),
        ("idefics3", {"do_image_splitting": False}),
        ("llava_next", {"nothing": 1}),
        ("mistral3", {"size": {"longest_edge": 56}}),
        ("qwen2_5_vl", {"size": {"shortest_edge": 3136, "longest_edge": 50_000}}),
    ],
)
def test_other_options_do_what_they_say(
    processors: Callable[[str], Processor], family: str, options: dict[str, object]
) -> None:
    """Alone or together, whatever the sizes of the pictures."""
    processor = processors(family)
    assert len(processed(processor, SIZES, options)) == len(SIZES)
    for size in SIZES:
        assert len(processed(processor, [size], options)) == 1


@pytest.mark.parametrize("family", ["qwen2_5_omni", "llava_onevision", "qwen2_audio"])
def test_films_and_sounds_are_taken_as_they_come(
    processors: Callable[[str], Processor], family: str
) -> None:
    """Options that say nothing change nothing, also for lengths that no example had."""
    processor = processors(family)
    rng = np.random.default_rng(5)
    media: dict[str, list[Any]] = {
        "audio": [(rng.random(length, dtype=np.float32), 16_000) for length in (3_000, 900_000)],
        "video": [np.zeros((frames, 90, 130, 3), np.uint8) for frames in (4, 16)],
    }
    for modality in media.keys() & processor.info.supported_mm_limits.keys():
        batch = Batch(modality, (), MediaOptions({"nothing": 1}, {}))
        for medium in media[modality]:
            assert len(process(processor, batch, [medium])) == 1


Described: TypeAlias = Callable[[object], object]
"""Has embeddings of an image processed, of which a client says this."""


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Described:
    model = tmp_path_factory.mktemp("qwen3_vl")
    MAKERS["qwen3_vl"]().save(model)
    config = ModelConfig(str(model), enable_mm_embeds=True)
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    check_items(processor, check_tensors)
    width = embeds_width(config, "image")
    assert width == 3 * config.get_inputs_embeds_size() == 3 * embeds_width(config, "audio")

    def of(grid: object) -> object:
        said = torch.as_tensor(grid)[None]
        brought = {"image_embeds": torch.zeros(4, width), "image_grid_thw": said}
        items = processor.info.parse_mm_data({"image": brought})
        return processor._apply_hf_processor(ProcessorInputs([], items), TimingContext())

    return of


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_embeddings_are_described_as_a_processor_would(
    described: Described, kind: torch.dtype
) -> None:
    assert described(torch.tensor([1, 4, 4], dtype=kind))
    assert described(torch.tensor([1, 2, 8], dtype=kind))


@pytest.mark.parametrize(
    ("grid", "what"),
    [
        ([1, -4, -4], "nothing that this model's processor would count"),
        ([4, 2, 2], "count"),  # an image has one frame
        ([16, 1, 1], "count"),  # patches are merged by four
        ([1, 3, 5], "count"),
        ([1, 2**62 + 4, 4], "count"),  # multiplied it is 16, in 64 bits
        ([4, 4], "must be 3 of torch.int64"),
        ([True, True, True], "must be 3 of torch.int64"),
    ],
)
def test_what_an_engine_would_end_with_is_refused(
    described: Described, grid: list[int], what: str
) -> None:
    with pytest.raises(RequestRejectedError, match=f"image_grid_thw.*{what}"):
        described(grid)


def test_a_processor_is_forgotten_with_its_model(tmp_path: Path) -> None:
    """A frontend whose models come and go keeps nothing of those that went."""
    MAKERS["llava"]().save(tmp_path)
    processor = MULTIMODAL_REGISTRY.create_processor(ModelConfig(str(tmp_path)))
    check_items(processor, check_tensors)
    assert processed(processor, SIZES[:1], {"nothing": 1})
    gone = weakref.ref(processor)
    del processor
    gc.collect()
    assert gone() is None

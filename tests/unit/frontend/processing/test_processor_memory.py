"""A processor that would enlarge media beyond its memory stops before it does."""

import tracemalloc
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import WhisperFeatureExtractor
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer

from common.media.decoded_media import check_options
from common.vllm_compat.renderer_patches import HfProcessorRuns, patch_renderer
from frontend.fetch.processor_memory import _SPECTRA, ProcessorMemory, limit_processors
from frontend.media_limits.policy import FetchPolicy, RefusedError
from frontend.processing.batch import Batch, MediaOptions, Processed, process
from frontend.processing.renderer import build_renderer
from tests.fakes.cards import make_card
from tests.families.makers import MAKERS

HUGE = 10**9


@pytest.fixture(scope="module", params=["qwen2_5_omni", "intern_vl_chat", "llava"])
def renderer(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    serve_args: Namespace,
) -> Iterator[BaseRenderer]:
    """Of a family that enlarges by PyTorch, one that does by Pillow, and one of fixed size."""
    path = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param]().save(path)
    model = {"model": str(path), "tokenizer": str(path), "trust_remote_code": True}
    args = Namespace(**{**vars(serve_args), "trust_remote_code": True})
    made = build_renderer(make_card(model={**model, "mm_device_do_normalize": False}), args)
    patch_renderer(made, runs=HfProcessorRuns(side="frontend", worker_id=None))
    yield made
    made.shutdown()


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    limit_processors(FetchPolicy(max_processor_mb=64))
    yield
    limit_processors(FetchPolicy())


def run(
    renderer: BaseRenderer, modality: str, medium: Any, options: dict[str, object]
) -> list[Processed]:
    batch = Batch(modality, [], MediaOptions(options, {}))
    return process(renderer.get_mm_processor(), batch, [medium])


def picture(side: int = 64) -> Image.Image:
    return Image.new("RGB", (side, side))


def film(frames: int) -> Any:
    told = {
        "fps": 2.0,
        "duration": frames / 2,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return np.zeros((frames, 64, 64, 3), np.uint8), told


def name_of(renderer: BaseRenderer) -> str:
    return str(renderer.model_config.hf_config.model_type)


def test_a_picture_of_any_size_fits(renderer: BaseRenderer) -> None:
    assert run(renderer, "image", picture(3000), {})


def test_a_picture_is_not_enlarged_beyond_the_limit(renderer: BaseRenderer) -> None:
    size: dict[str, dict[str, object]] = {
        "llava": {"size": {"height": 50_000, "width": 50_000}},
        "qwen2_5_omni": {"size": {"shortest_edge": HUGE, "longest_edge": 2 * HUGE}},
    }
    if (options := size.get(name_of(renderer))) is None:
        return
    sentence = r"take [\d,]+ MiB for it: at most 64 MiB are allowed \(--media-max-processor-mb\)"
    with pytest.raises(RefusedError, match=sentence):
        run(renderer, "image", picture(), options)
    assert run(renderer, "image", picture(), {}), "what was counted is forgotten"


def test_many_small_frames_are_refused(renderer: BaseRenderer) -> None:
    if name_of(renderer) == "llava":
        return
    size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    options: dict[str, object] = {"size": size} if name_of(renderer) == "qwen2_5_omni" else {}
    assert run(renderer, "video", film(8), options)
    with pytest.raises(RefusedError, match="--media-max-processor-mb"):
        run(renderer, "video", film(2000), options)


def test_by_default_a_film_of_64_frames_of_1080p_fits(renderer: BaseRenderer) -> None:
    """As large as Qwen2.5-VL's processor sees them, in multiples of 28 pixels; vLLM reads 32."""
    limit_processors(FetchPolicy())
    memory = ProcessorMemory(renderer.get_mm_processor())
    memory.take(64 * 1932 * 1092 * 3)
    with pytest.raises(RefusedError):
        memory.take(64 * 1932 * 1092 * 3)


def test_sounds_of_one_run_count_as_they_are_padded(renderer: BaseRenderer) -> None:
    """32 films of a second, each with its sound, took 2.3 GB where sounds are padded to 300 s."""
    with ProcessorMemory(renderer.get_mm_processor()) as memory:
        memory.take_sounds(4)  # of 30 s each
    with ProcessorMemory(renderer.get_mm_processor()) as memory:
        if name_of(renderer) != "qwen2_5_omni":
            memory.take_sounds(1000)  # it has none
            return
        with pytest.raises(RefusedError, match="--media-max-processor-mb"):
            memory.take_sounds(5)


def test_nothing_is_counted_outside_of_a_processor(renderer: BaseRenderer) -> None:
    with ProcessorMemory(renderer.get_mm_processor()), pytest.raises(RefusedError):
        picture().resize((20_000, 20_000))
    assert picture().resize((5_000, 5_000)).width == 5_000


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 9},
        {"hop_length": 1},
        {"audio_kwargs": {"hop_length": 1}},
        {"chunk_length": 30_000},
        {"n_fft": 1_000_000},
        {"feature_size": 500_000},
        {"text_kwargs": {"pad_to_multiple_of": 2}},
        {"temporal_patch_size": 9},
        {"num_frames": HUGE},
        {"fps": float("inf")},
        {"crop_size": {"height": HUGE}},
        {"image_size": [HUGE, 1]},
        {"max_dynamic_patch": 1000},
        {"second_per_grid_ts": [2.0]},
        {"fps": 1e-9},
        {"videos_kwargs": {"fps": [2.0, float("nan")]}},
        {"size": float("nan")},
        {"images_kwargs": {"image_std": [0.0, 0.0, 0.0]}},
        {"rescale_factor": 1e38},
        {"padding_value": float("nan")},
    ],
)
def test_an_option_without_bounds_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(VLLMValidationError, match="mm_processor_kwargs"):
        check_options(options)


def test_usual_options_are_taken() -> None:
    check_options(
        {"max_pixels": 12_845_056, "size": {"longest_edge": 25_165_824}, "fps": 2.5, "a": "b"}
    )
    check_options({"max_dynamic_patch": 12, "use_audio_in_video": True, "max_length": None})


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_a_large_picture_becomes_an_array_without_further_copies(mode: str) -> None:
    noise = Image.effect_noise((3000, 1501), 90.0)
    shown = Image.merge(mode, [noise, noise.rotate(90), noise, noise][: len(mode)])
    expected = np.frombuffer(shown.tobytes(), np.uint8).reshape(1501, 3000, -1)
    tracemalloc.start()
    array = np.array(shown, copy=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert array.shape == ((1501, 3000) if mode == "L" else (1501, 3000, len(mode)))
    assert (array.reshape(expected.shape) == expected).all()
    assert peak < 1.2 * array.nbytes
    assert np.asarray(shown, np.float32).dtype == np.float32


@pytest.mark.parametrize("mode", ["1", "P", "LA", "I;16", "F", "RGB"])
def test_other_pictures_become_the_arrays_that_they_were(mode: str) -> None:
    shown = Image.effect_noise((33, 20), 90.0).convert(mode)
    array = np.asarray(shown)
    assert array.shape[:2] == (20, 33)
    raw = ("raw", "L") if mode == "1" else ()
    assert array.tobytes() == shown.tobytes(*raw)


@pytest.mark.parametrize("chunk_s", [30, 300])
@pytest.mark.parametrize("samples", [1, 159, 160, 1000, 16_001, 400_000, 479_999, 480_000])
def test_padding_of_a_sound_costs_one_frame(
    chunk_s: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 sounds of a second held the one thread of processors for 150 s."""
    limit_processors(FetchPolicy())
    ear = WhisperFeatureExtractor(feature_size=128, chunk_length=chunk_s)
    heard = np.random.default_rng(samples).standard_normal((2, samples)).astype(np.float32)
    heard[1, samples // 2 :] = 0
    padded = np.zeros((2, chunk_s * 16_000), np.float32)
    padded[:, :samples] = heard
    theirs = _SPECTRA(ear, padded)
    ours = ear._torch_extract_fbank_features(padded)
    assert ours.shape == theirs.shape
    assert np.allclose(ours, theirs, rtol=0, atol=1e-6)
    computed: list[int] = []
    stft = torch.stft

    def noted(wave: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        computed.append(wave.shape[-1])
        return stft(wave, *args, **kwargs)

    monkeypatch.setattr(torch, "stft", noted)
    ear._torch_extract_fbank_features(padded)
    assert computed[0] <= samples + ear.n_fft + ear.hop_length


def test_silence_has_the_spectrum_of_all_of_it() -> None:
    limit_processors(FetchPolicy())
    ear = WhisperFeatureExtractor(feature_size=128)
    silence = np.zeros((1, 480_000), np.float32)
    ours = ear._torch_extract_fbank_features(silence)
    assert np.array_equal(ours, _SPECTRA(ear, silence))

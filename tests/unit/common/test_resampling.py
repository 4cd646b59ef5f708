"""Sounds are resampled as vLLM resamples them, in memory that they are worth."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from vllm.multimodal import audio
from vllm.multimodal.audio import AudioResampler

from common.media import resampling
from common.media.decoder_guard import guard_decoders
from frontend.bounded.memory_limit import MemoryLimit

MIB = 1 << 20


@pytest.fixture(autouse=True)
def guarded() -> None:
    guard_decoders()


def by_vllm(samples: NDArray[np.float32], rate: int, wanted: int) -> Any:
    """What vLLM's ``resample_audio_torchaudio`` does without the guard."""
    make = inspect.unwrap(audio._get_torchaudio_resampler)
    with torch.backends.mkldnn.flags(enabled=False):
        return make(rate, wanted)(torch.from_numpy(samples)).numpy()


def noise(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [(48_000, 16_000), (44_100, 16_000), (8_000, 16_000), (24_000, 16_000), (11_025, 16_000)],
)
@pytest.mark.parametrize("shape", [(1,), (50_001,), (2, 30_007)])
def test_short_sounds_are_resampled_as_vllm_does(
    rate: int, wanted: int, shape: tuple[int, ...]
) -> None:
    samples = noise(*shape)
    made = AudioResampler(wanted).resample(samples, orig_sr=rate)
    assert np.array_equal(made, by_vllm(samples, rate, wanted))


@pytest.mark.parametrize("rate", [32_000, 48_000, 96_000, 192_000, 768_000])
@pytest.mark.parametrize("more", [0, 1, 2, 46])
def test_pieces_of_a_sound_are_those_of_the_whole(rate: int, more: int) -> None:
    samples = noise(3_000_000 + more)
    made = AudioResampler(16_000).resample(samples, orig_sr=rate)
    assert np.array_equal(made, by_vllm(samples, rate, 16_000))


@pytest.mark.parametrize(
    ("rate", "wanted"), [(24_000, 16_000), (8_000, 16_000), (44_100, 16_000), (16_000, 24_000)]
)
def test_pieces_by_several_filters_differ_by_rounding_at_most(
    rate: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resampling, "RESAMPLED_AT_ONCE", 0)
    monkeypatch.setattr(resampling, "_PIECE", MIB)
    samples = noise(2, 500_003)
    made = AudioResampler(wanted).resample(samples, orig_sr=rate)
    whole = by_vllm(samples, rate, wanted)
    assert made.shape == whole.shape
    assert np.abs(made - whole).max() < 1e-5


@pytest.mark.parametrize("rate", [48_000, 40_000])
def test_ten_minutes_do_not_take_fifteen_times_their_samples(rate: int) -> None:
    samples = np.zeros(590 * rate, np.float32)
    with MemoryLimit(450 * MIB):
        made = AudioResampler(16_000).resample(samples, orig_sr=rate)
    assert len(made) == 590 * 16_000


@pytest.mark.parametrize("rate", [15_999, 47_999, 16_001, 767_999])
def test_rates_without_a_common_measure_are_refused(rate: int) -> None:
    with (
        MemoryLimit(64 * MIB),
        pytest.raises(ValueError, match=f"{rate} Hz is not resampled to 16000 Hz"),
    ):
        AudioResampler(16_000).resample(np.zeros(rate, np.float32), orig_sr=rate)


@pytest.mark.parametrize("rate", [11_025, 22_050, 37_800, 44_100, 47_250, 47_952, 88_200, 176_400])
def test_rates_of_recorders_are_taken(rate: int) -> None:
    made = AudioResampler(16_000).resample(np.zeros(rate, np.float32), orig_sr=rate)
    assert len(made) == 16_000


def test_large_kernels_are_not_kept() -> None:
    resampler = AudioResampler(16_000)
    kept = inspect.unwrap(
        audio._get_torchaudio_resampler, stop=lambda each: hasattr(each, "cache_info")
    )
    kept.cache_clear()
    resampler.resample(np.zeros(1_000, np.float32), orig_sr=47_952)
    assert kept.cache_info().currsize == 0
    resampler.resample(np.zeros(1_000, np.float32), orig_sr=44_100)
    assert kept.cache_info().currsize == 1

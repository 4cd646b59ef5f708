"""Limit the memory of a model's processor, before it enlarges media.

A processor enlarges small frames to the model's minimum: 1,000 frames of 64x64 took 3 GB. Options
of a request may ask for any size.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, Self

import numpy as np
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode
from transformers import WhisperFeatureExtractor
from vllm.multimodal.processing import BaseMultiModalProcessor

from common.media.picture_strips import is_large, strips
from frontend.media_limits import MIB, FetchPolicy, RefusedError

_FLOAT_BYTES: Final = 13
"""Per value of an enlarged medium: bytes, floats, patches of floats, and these together for all
media. Measured: 12.2 to 13.0 with Qwen2-VL's and Qwen2.5-Omni's processors."""

_INTEGER_BYTES: Final = 4
"""The same where the engine normalizes pixels (``--mm-device-do-normalize``): 3.0 to 3.6."""

_SAMPLE_BYTES: Final = 34
"""Per sample of a padded sound: 160 MB for 300 s at 16 kHz were measured."""

_SPECTRA: Final[Any] = WhisperFeatureExtractor._torch_extract_fbank_features

_PIL_RESIZE: Final = Image.Image.resize
_PIL_ARRAY: Final[Any] = Image.Image.__array_interface__


class _Threads(threading.local):
    """The counter of each thread that runs a processor."""

    memory: "ProcessorMemory | None" = None


_THREADS: Final = _Threads()


class ProcessorMemory(TorchFunctionMode):
    """Counts the output of a processor in the thread that enters it.

    PyTorch's and Pillow's functions that enlarge media raise RefusedError beyond the limit.
    """

    limit: int = FetchPolicy().max_processor_bytes

    def __init__(self, processor: BaseMultiModalProcessor[Any], media: int = 1) -> None:
        """Allow the limit for each of ``media`` processed at once."""
        super().__init__()
        config = processor.info.ctx.model_config.get_multimodal_config()
        self._for_value = _INTEGER_BYTES if config.mm_device_do_normalize else _FLOAT_BYTES
        self._limit = self.limit * media
        self._taken = 0
        self._processor = processor

    def take(self, values: float) -> None:
        """Count values before they are made. Raises RefusedError."""
        self._take(int(values) * self._for_value)

    def take_sounds(self, sounds: int) -> None:
        """Count sounds of one run, each of which a Whisper encoder's processor pads to its longest.
        Raises RefusedError.
        """
        if sounds:
            ear = getattr(self._processor.info.get_hf_processor(), "feature_extractor", None)
            self._take(sounds * getattr(ear, "n_samples", 0) * _SAMPLE_BYTES)

    def _take(self, nbytes: int) -> None:
        self._taken += nbytes
        if self._taken > self._limit:
            raise RefusedError(
                f"the model's processor would take {self._taken // MIB:,} MiB for it: at most "
                f"{self._limit // MIB:,} MiB are allowed (--media-max-processor-mb), so send fewer "
                "or smaller frames, or ask for a smaller size"
            )

    def __enter__(self) -> Self:
        _THREADS.memory = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _THREADS.memory = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (reckon := _RECKONED.get(func)) is not None:
            self.take(reckon(*args, **kwargs))
        return func(*args, **kwargs)


def limit_processors(policy: FetchPolicy) -> None:
    """Set the limit per medium for the processors of this process. Idempotent."""
    ProcessorMemory.limit = policy.max_processor_bytes
    WhisperFeatureExtractor._torch_extract_fbank_features = _spectra
    Image.Image.resize = _resize  # type: ignore[method-assign] # one for all pictures
    pictures: Any = Image.Image
    if hasattr(pictures, "__array_interface__"):
        del pictures.__array_interface__  # NumPy would prefer it to ``__array__``
    pictures.__array__ = _array


@wraps(_PIL_RESIZE)
def _resize(self: Image.Image, size: Any, *args: Any, **kwargs: Any) -> Image.Image:
    if _THREADS.memory is not None:
        _THREADS.memory.take(math.prod(size) * len(self.getbands()))
    return _PIL_RESIZE(self, size, *args, **kwargs)


def _array(self: Image.Image, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """Return a picture's values, avoiding the three copies of Pillow and NumPy."""
    if not is_large(self) or self.mode not in ("L", "RGB", "RGBA"):
        return np.array(_Interface(_PIL_ARRAY.fget(self)), dtype, copy=copy)
    bands = len(self.getbands())
    whole = np.empty((self.height, self.width, bands), np.uint8)
    for top, strip in strips(self):
        values = np.frombuffer(strip.tobytes(), np.uint8)
        whole[top : top + strip.height] = values.reshape(-1, self.width, bands)
    made = whole if bands > 1 else whole[..., 0]
    return made if dtype is None else made.astype(dtype, copy=False)


@wraps(_SPECTRA)
def _spectra(self: Any, waveform: np.ndarray, device: str = "cpu") -> np.ndarray:
    """Return the log-mel spectra of padded sounds, computing only one frame of the padding: each
    short sound took 0.2 to 1 s where a model pads to 300 s.
    """
    heard = int(np.flatnonzero(waveform.any(axis=0))[-1:].sum()) + 1
    needed = -(-(heard + self.n_fft) // self.hop_length) * self.hop_length
    can_be_cut = waveform.ndim == 2 and not self.dither and self.n_fft >= 2 * self.hop_length
    if device != "cpu" or not can_be_cut or needed >= waveform.shape[-1]:
        whole: np.ndarray = _SPECTRA(self, waveform, device)
        return whole
    some = _SPECTRA(self, waveform[:, :needed], device)
    missing = waveform.shape[-1] // self.hop_length - some.shape[-1]
    return np.concatenate([some, np.repeat(some[..., -1:], missing, axis=-1)], axis=-1)


class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _interpolated(
    input: torch.Tensor, size: Any = None, scale_factor: Any = None, *_: Any, **__: Any
) -> float:
    """Return the number of values of an enlarged tensor, whose last sides are a picture's."""
    sides = input.dim() - 2
    if size is None:
        return input.numel() * math.prod(_each(scale_factor or 1, sides))
    return input.shape[:2].numel() * math.prod(_each(size, sides))


def _padded(input: torch.Tensor, pad: Sequence[int], *_: Any, **__: Any) -> float:
    """Return the number of values added at a tensor's borders."""
    shape = list(input.shape)
    for index, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=False)):
        shape[-1 - index] += before + after
    return max(0, math.prod(shape) - input.numel())


def _each(value: Any, sides: int) -> Sequence[float]:
    return value if isinstance(value, Sequence) else [value] * sides


_RECKONED: Final[Mapping[Callable[..., Any], Callable[..., float]]] = {
    torch.nn.functional.interpolate: _interpolated,
    torch.nn.functional.pad: _padded,
}

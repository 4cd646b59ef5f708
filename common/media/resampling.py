"""Resample like vLLM, by torchaudio, but in bounded memory."""

import math
from functools import partial, wraps
from typing import Any, Final

import torch
from torch.nn.functional import conv1d, pad
from vllm.multimodal import audio

_VLLMS_RESAMPLER: Final[Any] = audio._get_torchaudio_resampler
MAX_KERNEL: Final = 1 << 23
"""Numbers of a resampler's kernel, each of which takes 31 bytes while it is made. From 15,999 to
16,000 Hz there are 256 million."""

_KEPT_KERNEL: Final = 1 << 19
"""Numbers of a kernel that vLLM may keep, of 32 pairs of rates."""

RESAMPLED_AT_ONCE: Final = 256 << 20
"""Bytes of samples side by side, up to 15 times the sound, for which several filters resample it
whole; a longer sound is resampled piece by piece."""

_PIECE: Final = 4 << 20
"""Bytes of them in a piece. Memory beyond 32 MiB is new, page by page, each time it is allocated:
pieces of 64 MiB took two and a half times as long."""


@wraps(_VLLMS_RESAMPLER)
def thrifty_resampler(rate: int, wanted: int) -> Any:
    """Resample like vLLM, but long audio in less memory. Raises ValueError: the rates take too
    much. torchaudio's number of filters is the reduced numerator of ``wanted / rate``; each is as
    long as a period of both rates."""
    common = math.gcd(rate, wanted)
    period, filters = rate // common, wanted // common
    kernel = filters * (period + 12 * -(-period // min(period, filters)))
    if kernel > MAX_KERNEL:
        raise ValueError(
            f"Sound of {rate} Hz is not resampled to {wanted} Hz, which takes too much memory: "
            "send it at 16000, 24000, 44100 or 48000 Hz"
        )
    make = _VLLMS_RESAMPLER if kernel <= _KEPT_KERNEL else _VLLMS_RESAMPLER.__wrapped__
    return partial(_resampled, make(rate, wanted))


def _resampled(resampler: Any, samples: torch.Tensor) -> torch.Tensor:
    """Apply ``resampler``, in pieces: bit-exact for one filter, as from 48 to 16 kHz. For more
    filters the summation order of a few products depends on the piece size, so only long audio is
    cut."""
    step = resampler.orig_freq // resampler.gcd
    taps = resampler.kernel.shape[-1]
    side_by_side = samples.numel() // step * taps * samples.element_size()
    if len(resampler.kernel) > 1 and side_by_side <= RESAMPLED_AT_ONCE:
        whole: torch.Tensor = resampler(samples)
        return whole
    wanted = -(-resampler.new_freq * samples.shape[-1] // resampler.orig_freq)
    channels = samples.view(-1, samples.shape[-1])
    made = torch.empty(len(channels), wanted)
    for channel, into in zip(channels, made, strict=True):
        padded = pad(channel[None], (resampler.width, resampler.width + step))
        frames = (padded.shape[-1] - taps) // step + 1
        at_once = _PIECE // (taps * samples.element_size())
        filled = 0
        for first in range(0, frames, at_once):
            last = min(first + at_once, frames) - 1
            some = padded[:, first * step : last * step + taps]
            piece = conv1d(some, resampler.kernel, stride=step).T.reshape(-1)[: wanted - filled]
            into[filled : filled + len(piece)] = piece
            filled += len(piece)
    return made.view(*samples.shape[:-1], wanted)

"""Count a sound's samples, by its header or its packets."""

from dataclasses import dataclass
from io import BytesIO
from typing import Final

import av
import soundfile  # type: ignore[import-untyped] # it has no types
from vllm import envs

from common.media.decoder_guard import SOUND_RATES
from frontend.media_limits import RefusedError

_SAMPLE_BYTES: Final = 4
SLACK: Final = 1 << 20
"""Bytes by which decoders may exceed the announced size: padding, mostly."""

READABLE_SOUNDS: Final = "WAV, FLAC, MP3, Ogg, WebM or M4A"
"""Formats that every installation decodes, for error messages."""

PROCESSOR_RATE: Final = 48_000
"""Hz. The most that models ask for; the actual rate isn't known where sound is decoded."""


@dataclass(frozen=True)
class SoundSize:
    """Bytes of a sound: decoded (four for each sample of each channel), and as
    :func:`processed_bytes`.
    """

    decoded: int
    processed: int


def sound_size(data: bytes) -> SoundSize:
    """Return a sound's size without decoding it. A wrong header must be caught when decoding
    reaches the size. Raises RefusedError if it is no sound or its rate is invalid.
    """
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            rate = _checked_rate(file.samplerate)
            decoded = int(file.frames) * int(file.channels) * _SAMPLE_BYTES
    except soundfile.LibsndfileError:
        decoded, rate = _packets(data)
    return SoundSize(decoded, processed_bytes(decoded, rate))


def processed_bytes(decoded: int, rate: float) -> int:
    """Return the bytes of a sound in a processor, with all copies, from its decoded bytes and rate
    in Hz.

    Resampling holds it twice, and spectra take thrice its bytes at ``PROCESSOR_RATE``: 590 s took
    377, 406 and 586 MB at 8, 16 and 48 kHz with Qwen2.5-Omni's processor.
    """
    return 2 * decoded + int(3 * decoded * PROCESSOR_RATE / rate)


def _checked_rate(rate: int) -> int:
    if rate not in SOUND_RATES:
        between = f"between {SOUND_RATES[0]} and {SOUND_RATES[-1]}"
        raise RefusedError(f"its sample rate is {rate} Hz, which is not {between}")
    return rate


def _packets(data: bytes) -> tuple[int, int]:
    """Return decoded bytes and rate from FFmpeg's packets."""
    most = int(envs.VLLM_MAX_AUDIO_DECODE_BYTES)
    try:
        with av.open(BytesIO(data), "r") as container:
            if not container.streams.audio:
                raise RefusedError("it has no sound")
            stream = container.streams.audio[0]
            if stream.codec_context is None:
                raise RefusedError(
                    f"there is no decoder for its codec here: send {READABLE_SOUNDS}"
                )
            rate = _checked_rate(stream.rate or 0)
            if stream.time_base is None:
                return most, rate
            ticks = 0
            for packet in container.demux(stream):
                if packet.size and packet.duration is None:
                    return most, rate
                ticks += max(0, packet.duration or 0)
            samples = int(ticks * stream.time_base * rate) + 1
            wide = max(_SAMPLE_BYTES, stream.format.bytes)
            return samples * max(1, stream.channels) * wide, rate
    except av.error.FFmpegError as error:
        raise RefusedError("it can't be decoded as sound") from error

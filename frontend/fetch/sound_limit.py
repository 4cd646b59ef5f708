"""How many samples a sound has, by its header or by the packets that it comes in."""

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
"""Bytes by which decoders may give more than was said: padding, mostly."""


READABLE_SOUNDS: Final = "WAV, FLAC, MP3, Ogg, WebM or M4A"
"""Formats that every installation decodes, for error messages."""

PROCESSOR_RATE: Final = 48_000
"""Hz. The most that models ask for; which rate a model's processor resamples to isn't known
where sound is decoded."""


@dataclass(frozen=True)
class SoundSize:
    """Bytes that a sound takes.

    Attributes:
        decoded: four for each sample of each channel.
        processed: while a model's processor has it, see :func:`processed_bytes`.
    """

    decoded: int
    processed: int


def sound_size(data: bytes) -> SoundSize:
    """What a sound takes when it is decoded, and when it is processed for a model.

    Nothing is decoded to find out. Who lies about it has to be stopped when decoding reaches
    what was said.

    Raises:
        RefusedError: it is no sound, or its rate is none that sound has.
    """
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            rate = _checked_rate(file.samplerate)
            decoded = int(file.frames) * int(file.channels) * _SAMPLE_BYTES
    except soundfile.LibsndfileError:
        decoded, rate = _packets(data)
    return SoundSize(decoded, processed_bytes(decoded, rate))


def processed_bytes(decoded: int, rate: float) -> int:
    """Return what so many bytes of a sound at a rate in Hz take with all copies of a processor.

    They are there twice while they are resampled, and spectra take thrice what ``PROCESSOR_RATE``
    would: 590 s took 377, 406 and 586 MB at 8, 16 and 48 kHz with Qwen2.5-Omni's processor.
    """
    return 2 * decoded + int(3 * decoded * PROCESSOR_RATE / rate)


def _checked_rate(rate: int) -> int:
    if rate not in SOUND_RATES:
        between = f"between {SOUND_RATES[0]} and {SOUND_RATES[-1]}"
        raise RefusedError(f"its sample rate is {rate} Hz, which is not {between}")
    return rate


def _packets(data: bytes) -> tuple[int, int]:
    """Bytes decoded, and the rate, of what FFmpeg reads."""
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

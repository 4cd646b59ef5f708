"""Frames of films whose colours OpenCV does not convert."""

import io
from fractions import Fraction

import av
import cv2
import numpy as np
import numpy.typing as npt
import pytest
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO

from common.media import film_frames
from common.media.decoder_guard import guard_decoders
from common.media.film_frames import VerifiedCapture
from tests.pictures import random_of

Frames = npt.NDArray[np.uint8]
FRAMES = 6
INTERLACED = {"flags": "+ildct+ilme"}


def shown() -> Frames:
    return np.stack(
        [
            np.kron(
                random_of(f"frame {n}").integers(0, 256, (3, 4, 3), dtype=np.uint8),
                np.ones((32, 32, 1), np.uint8),
            )
            for n in range(FRAMES)
        ]
    )


def film(codec: str, container: str = "mp4", **options: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=4, options=options)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = shown().shape[1:3]
        stream.pix_fmt = "bgr24" if codec == "flashsv" else "yuv420p"
        for frame in shown():
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def seen(data: bytes) -> Frames:
    guard_decoders()
    frames: Frames = VideoMediaIO(ImageMediaIO()).load_bytes(data).media[0]
    return frames


def mean_error(frames: Frames) -> float:
    return float(np.abs(frames.astype(int) - shown()).mean())


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("mpeg4", INTERLACED),
        ("mpeg2video", INTERLACED),
        ("libx264", {"x264-params": "tff=1"}),
        ("libx264", {"x264-params": "transfer=log100"}),
        ("libx264", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value.values()) or "plain",
)
def test_the_frames_of_a_film_are_its_pictures(codec: str, options: dict[str, str]) -> None:
    assert mean_error(seen(film(codec, **options))) < 10


def test_a_film_whose_colours_cannot_be_converted_is_refused() -> None:
    ictcp = film("libx264", **{"x264-params": "colormatrix=ictcp:colorprim=bt2020"})
    with pytest.raises(ValueError, match="colours of the film can't be converted"):
        seen(ictcp)


class Stale:
    """A capture that converts its first frame only."""

    def grab(self) -> bool:
        return True

    def set(self, option: int, value: float) -> bool:
        return True

    def retrieve(self) -> tuple[bool, Frames]:
        return True, self.first

    def __init__(self, first: Frames) -> None:
        self.first = first


def test_codecs_that_show_uninitialized_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Its codec \(flashsv\) is not read: send H.264"):
        seen(film("flashsv", "flv"))
    with pytest.raises(ValueError, match=r"Its codec \(ra_144\) is not read"):
        AudioMediaIO().load_bytes(sound_of("ra_144", 8_000))


def sound_of(codec: str, rate: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        assert isinstance(stream, av.AudioStream)
        for _ in range(50):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 160), np.int16), "s16", "mono")
            frame.sample_rate = rate
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def test_a_frame_that_is_not_converted_is_not_the_previous_one() -> None:
    data = film("libx264")
    first = cv2.cvtColor(seen(data)[0], cv2.COLOR_RGB2BGR)
    capture = VerifiedCapture(Stale(first), data)
    frames = [capture.read()[1] for _ in range(FRAMES)]
    assert mean_error(np.stack([frame[..., ::-1] for frame in frames if frame is not None])) < 10


def test_after_a_seek_the_right_frame_is_verified() -> None:
    data = film("mpeg4", **INTERLACED)
    capture = VerifiedCapture(Stale(np.zeros((96, 128, 3), np.uint8)), data)
    for index in (4, 1, 3):
        capture.set(cv2.CAP_PROP_POS_FRAMES, index)
        good, frame = capture.read()
        assert good
        assert frame is not None
        assert np.abs(frame[..., ::-1].astype(int) - shown()[index]).mean() < 10


HDR = "colormatrix=bt2020nc:colorprim=bt2020:transfer=smpte2084"


def test_films_of_one_size_and_colour_share_their_table() -> None:
    hdr = film("libx264", **{"x264-params": HDR})
    first = seen(hdr)
    made = list(film_frames._kept)
    assert np.array_equal(seen(hdr), first)
    assert film_frames._kept == made
    assert mean_error(first) > 10  # brighter than the screen


def test_a_film_whose_colours_change_at_each_frame_is_refused() -> None:
    mapped = VerifiedCapture(Stale(np.zeros((96, 128, 3), np.uint8)), changing_screens())
    with pytest.raises(ValueError, match="HDR frames are of more than 2 kinds"):
        for _ in range(FRAMES * FRAMES):
            mapped.read()


def changing_screens() -> bytes:
    """A film that names another luminance of its screen with each picture."""
    told = ":mastering-display=G(13250,34500)B(7500,3000)R(34000,16000)WP(15635,16450)L({},1)"
    parts = [HDR + told.format(luminance * 10_000_000) for luminance in range(1, FRAMES)]
    return b"".join(film("libx264", "mpegts", **{"x264-params": each}) for each in parts)


def test_a_still_frame_of_another_size_is_scaled() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as file:
        stream = file.add_stream("mjpeg", rate=4)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuvj420p"
        for n, scale in enumerate((1, 1, 2, 2)):
            codec = av.CodecContext.create("mjpeg", "w")
            codec.height, codec.width, codec.pix_fmt = 48 * scale, 64 * scale, "yuvj420p"
            codec.time_base = Fraction(1, 4)
            grey = np.full((codec.height, codec.width, 3), 99, np.uint8)
            (packet,) = codec.encode(av.VideoFrame.from_ndarray(grey, format="rgb24"))
            packet.stream, packet.pts, packet.dts = stream, n, n
            file.mux(packet)
    frames = seen(buffer.getvalue())
    assert frames.shape == (4, 48, 64, 3)
    assert np.abs(frames.astype(int) - 99).max() < 4

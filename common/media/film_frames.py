"""Verify the frames that OpenCV returns by PyAV's.

OpenCV ignores errors of FFmpeg's colour conversion, which refuses interlaced frames and several
colour spaces. It then returns uninitialized memory as the first frame, where media of other
requests may have been, and later the previous frame again. PyAV converts interlaced frames, to the
same bytes as OpenCV in all other cases, and raises an error for the rest.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import av
import cv2
import numpy as np
import numpy.typing as npt

from common.media.formats import check_codecs

if TYPE_CHECKING:
    from av.video.reformatter import VideoReformatter

Frame = npt.NDArray[np.uint8]

_BT709: Final = 1
_HDR: Final = {16, 18}
_WIDE: Final = range(8, 13)
"""Transfers (PQ, HLG) and primaries (BT.2020, P3 and the like) that FFmpeg maps to BT.709. The
table for that takes seconds of a core, so only PyAV makes it."""

_SCREEN: Final = "MASTERING_DISPLAY_METADATA"
"""Luminance of the screen that the film was made for, with some frames only."""

UP_TO_4K: Final = 4096 * 2160
"""Pixels of a frame whose film is decoded by several threads: each keeps a frame."""

THREADS_OF_4K: Final = 4

_MAX_TABLES: Final = 2
"""Tables of one film, which could change its size or colours at each frame."""

_MAX_KEPT: Final = 8
"""Tables kept for later films of the same size and colours, of 7 MB each."""

_kept: "Final[list[tuple[tuple[object, ...], VideoReformatter]]]" = []
_keeping: Final = threading.Lock()

_PNGS: Final = ("png", "apng")
_PNG_TEXTS: Final = (b"tEXt", b"zTXt", b"iTXt")
_MAX_PNG_TEXTS: Final = 1_000
"""Of one frame or cover: 40,000, of 0.8 MB, took 5 s whenever a film or sound was opened."""
_MAX_REPEATED: Final = 4
_FREE_BYTES: Final = 1 << 20
_PACKET: Final = 32  # bytes that a packet counts for besides its own

_STEP: Final = 8
_UNCONVERTIBLE: Final = (
    "The colours of the film can't be converted (colour space {}, transfer {}): send a film in "
    "BT.709 or BT.2020"
)


class VerifiedCapture:
    """A ``cv2.VideoCapture`` that takes a film's frames from PyAV where OpenCV's are wrong.

    Three cases need PyAV: the first frame; a frame that equals the previous one, as after a failed
    conversion; and all frames of a film once one was wrong.
    """

    def __init__(self, capture: Any, data: bytes) -> None:
        self._capture = capture
        self._film = _Film(data)
        self._next = 0  # index of the frame that OpenCV decodes next
        self._last: Frame | None = None
        self._is_wrong = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture, name)

    def maps_colours(self) -> bool:
        """Return whether the first frame's colours need a table."""
        return self._film.maps_colours()

    def set(self, option: int, value: float) -> bool:
        """Set an option, or seek."""
        if option == cv2.CAP_PROP_POS_FRAMES:
            self._next = int(value)
        return bool(self._capture.set(option, value))

    def grab(self) -> bool:
        """Decode the next frame."""
        good = bool(self._capture.grab())
        self._next += good
        return good

    def read(self) -> tuple[bool, Frame | None]:
        """Decode and return the next frame."""
        return self.retrieve() if self.grab() else (False, None)

    def retrieve(self) -> tuple[bool, Frame | None]:
        """Return the decoded frame in BGR. Raises ValueError if its colours can't be converted."""
        index = self._next - 1
        if self._last is None:
            self._is_wrong = self._is_wrong or not self._film.is_plain(index)
        frame = None
        if not self._is_wrong:
            good, frame = self._capture.retrieve()
            if not good or not self._is_doubtful(frame):
                return good, frame
        picture = self._film.picture(index)
        self._is_wrong = picture is None or frame is None or not np.array_equal(frame, picture)
        return picture is not None, picture

    def _is_doubtful(self, frame: Frame) -> bool:
        last, self._last = self._last, frame[::_STEP, ::_STEP].copy()
        return last is None or last.shape != self._last.shape or np.array_equal(last, self._last)


class _Film:
    """A film's frames by PyAV, decoded when they are asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._frames: Iterator[av.VideoFrame] = iter(())
        self._index = -1  # of the decoded frame
        self._frame: av.VideoFrame | None = None
        self._size = {"width": 0, "height": 0}
        self._converter = av.video.reformatter.VideoReformatter()
        self._tables: set[tuple[object, ...]] = set()

    def maps_colours(self) -> bool:
        frame = self._decoded(0)
        return frame is not None and bool(_mapping(frame))

    def is_plain(self, index: int) -> bool:
        """Return whether OpenCV converts a frame, and without a table."""
        frame = self._decoded(index)
        return frame is not None and not frame.interlaced_frame and not _mapping(frame)

    def picture(self, index: int) -> Frame | None:
        """Return a frame in BGR, upright, in the film's size, as OpenCV does; None if it can't be
        decoded. Raises ValueError if its colours can't be converted."""
        frame = self._decoded(index)
        if frame is None:
            return None
        mapping = _mapping(frame)
        with self._converter_for(frame) if mapping else nullcontext(self._converter) as converter:
            try:
                converted = converter.reformat(
                    frame, format="bgr24", interpolation="BICUBIC", **self._size, **mapping
                )
            except (OSError, ValueError) as error:
                message = _UNCONVERTIBLE.format(frame.colorspace, frame.color_trc)
                raise ValueError(message) from error
        picture = np.asarray(converted.to_ndarray(), np.uint8)
        turns, skew = divmod(frame.rotation, 90)
        return picture if skew else np.ascontiguousarray(np.rot90(picture, turns))

    def _converter_for(self, frame: av.VideoFrame) -> "AbstractContextManager[VideoReformatter]":
        """Lend a converter with a table. Raises ValueError: the film needs too many."""
        told: Any = frame.side_data
        colours = (
            *(frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range),
            *(frame.color_trc, frame.color_primaries, *self._size.values()),
            bytes(told[_SCREEN]) if _SCREEN in told else b"",
        )
        self._tables.add(colours)
        if len(self._tables) > _MAX_TABLES:
            raise ValueError(f"Its HDR frames are of more than {_MAX_TABLES} kinds")
        return _kept_converter(colours)

    def _decoded(self, index: int) -> av.VideoFrame | None:
        if index < self._index or self._index < 0:
            self._frames, self._index = self._decode(), -1
        while self._index < index:
            self._frame = next(self._frames, None)
            self._index += 1
        return self._frame

    def _decode(self) -> Iterator[av.VideoFrame]:
        """Yield the frames of the first video stream, without those that are damaged. Raises
        ValueError: its codec is not read."""
        with av.open(BytesIO(self._data), "r") as container:
            check_codecs(container.streams.video)
            pictures = container.streams.video[0]
            # Later the codec's, which may change.
            self._size = {"width": pictures.width, "height": pictures.height}
            if pictures.width * pictures.height <= UP_TO_4K:
                pictures.thread_type = "AUTO"
                pictures.codec_context.thread_count = THREADS_OF_4K
            for packet in container.demux(pictures):
                decoded: list[Any] = []
                with suppress(av.error.FFmpegError):
                    decoded = pictures.decode(packet)
                yield from decoded


def _mapping(frame: av.VideoFrame) -> dict[str, int]:
    """Return the transfer and primaries that FFmpeg maps a frame's to; empty if it keeps them."""
    transfer, primaries = int(frame.color_trc), int(frame.color_primaries)
    if transfer not in _HDR and primaries not in _WIDE:
        return {}
    return {
        "dst_color_trc": _BT709 if transfer in _HDR else transfer,
        "dst_color_primaries": _BT709 if primaries in _WIDE else primaries,
    }


@contextmanager
def _kept_converter(colours: tuple[object, ...]) -> "Iterator[VideoReformatter]":
    """Lend a converter, one that has made the table for these colours if there is one."""
    with _keeping:
        index = next((index for index, each in enumerate(_kept) if each[0] == colours), None)
        converter = (
            av.video.reformatter.VideoReformatter() if index is None else _kept.pop(index)[1]
        )
    yield converter
    with _keeping:
        _kept.append((colours, converter))
        del _kept[:-_MAX_KEPT]


def check_texts(container: Any, data: bytes) -> None:
    """Raise ValueError for a PNG of many texts: FFmpeg compares each with all before it."""
    pictures = [
        stream
        for stream in container.streams.video
        if stream.codec_context is not None and stream.codec_context.name in _PNGS
    ]
    left = _MAX_REPEATED * len(data) + _FREE_BYTES
    packets = container.demux(*pictures)
    while pictures:
        try:
            packet = next(packets, None)
        except av.error.FFmpegError:
            packet, pictures = data, []  # whatever can be read of it
        if packet is None:
            break
        piece = bytes(packet)
        left -= len(piece) + _PACKET
        if left < 0 or sum(map(piece.count, _PNG_TEXTS)) > _MAX_PNG_TEXTS:
            raise ValueError("The medium has a PNG with too many texts, or the same one often")

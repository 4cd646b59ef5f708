"""Small videos for tests."""

import base64
import io
from pathlib import Path

import av
import cv2
import numpy as np
from PIL import Image


def video(directory: Path, frames: int = 10, width: int = 64, height: int = 48) -> bytes:
    """An AVI whose frames differ."""
    path = directory / f"{frames}-{width}-{height}.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 5.0, (width, height))
    for n in range(frames):
        writer.write(np.full((height, width, 3), n * 20 % 256, np.uint8))
    writer.release()
    return path.read_bytes()


def uncounted(frames: int = 10) -> bytes:
    """A film as it is sent while it is made: its header says neither length nor frames."""

    class Wire(io.BytesIO):
        def seekable(self) -> bool:
            return False

    wire = Wire()
    with av.open(wire, "w", format="matroska", options={"live": "1"}) as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for n in range(frames):
            grey = np.full((48, 64, 3), n * 20 % 256, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        file.mux(stream.encode())
    return wire.getvalue()


def encoded_film(container: str, codec: str, frames: int = 8, pixels: str = "yuv420p") -> bytes:
    """A film of 64x48 pixels in any container and codec that FFmpeg writes."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=25)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        if codec == "libx265":  # times of its last frames are random otherwise, and may be no times
            stream.options = {"tune": "zerolatency"}
        for n in range(frames):
            grey = np.full((48, 64, 3), n * 20 % 256, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def jpeg(width: int, height: int) -> bytes:
    """A black JPEG."""
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "JPEG")
    return buffer.getvalue()


def jpeg_sequence(frames: int, width: int = 64, height: int = 48) -> str:
    """A data URL of vLLM's ``video/jpeg``."""
    frame = base64.b64encode(jpeg(width, height)).decode()
    return "data:video/jpeg;base64," + ",".join([frame] * frames)

"""Texts that FFmpeg takes for media, and that name a file or an address for it to open."""

import io
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import av
import numpy as np

from tests.clips import film, sound

CANARY_SOUND: Final = "canary.wav"
CANARY_FILM: Final = "canary.mp4"
"""In the current directory, where names without a directory lead."""

_ID3: Final = b"ID3\x03\0\0\0\0\0\0"


def put_canaries(directory: Path) -> None:
    """Write the files that must not be opened."""
    (directory / CANARY_SOUND).write_bytes(sound("canary"))
    (directory / CANARY_FILM).write_bytes(film("canary"))


def naming(name: str, port: int = 9) -> Mapping[str, bytes]:
    """Media that refer to a file, each in its own way.

    Args:
        port: of loopback, for those that refer to an address too.
    """
    concat = f"ffconcat version 1.0\nfile {name}\n".encode()
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{name}\n#EXT-X-ENDLIST\n".encode()
    return {
        "ffconcat": concat,
        "ffconcat with an address": concat + f"file http://127.0.0.1:{port}/x\n".encode(),
        "ffconcat behind a tag": _ID3 + concat + b"#" * 4000 + b"\n",
        "ffconcat behind two tags": 2 * _ID3 + concat + b"#" * 4000 + b"\n",
        "HLS": hls,
        "HLS behind a tag": _ID3 + hls + b"#" * 4000 + b"\n",
        "HLS over HTTP": hls.replace(name.encode(), f"http://127.0.0.1:{port}/x.ts".encode()),
        "DASH": _dash(name).encode(),
        "a QuickTime reference": quicktime(name),
        "a name": name.encode(),
        "a name with a protocol": f"concat:{name}|{name}".encode(),
        "a WAVE header before a list": b"RIFF\x00\x00\x00\x00WAVE\n" + concat,
        "lyrics": f"[ffmetadata]\n;FFMETADATA1\n{name}\n".encode(),
    }


def sdp(port: int) -> bytes:
    """A text that makes FFmpeg listen on a UDP port."""
    return (
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
        f"m=audio {port} RTP/AVP 0\na=rtpmap:0 PCMU/8000\n"
    ).encode()


def _dash(name: str) -> str:
    return (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        'mediaPresentationDuration="PT1S" profiles="urn:mpeg:dash:profile:isoff-on-demand:2011">'
        '<Period><AdaptationSet mimeType="audio/mp4"><Representation id="1" bandwidth="1">'
        f"<BaseURL>{name}</BaseURL></Representation></AdaptationSet></Period></MPD>"
    )


def quicktime(name: str) -> bytes:
    """A QuickTime file whose sound is in another file, by an alias record."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mov") as file:
        stream = file.add_stream("pcm_s16le", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 4000), np.int16), format="s16", layout="mono"
        )
        frame.sample_rate, frame.pts = 16_000, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    data = buffer.getvalue()
    at = data.index(b"dref") - 4
    size = struct.unpack(">I", data[at : at + 4])[0]
    record = bytes(10) + bytes([0]) + bytes(27) + bytes(12)
    start = name.encode()[:63]  # all that there is room for; the whole path comes below
    record += bytes([len(start)]) + start.ljust(63, b"\0") + bytes(16)
    record += struct.pack(">hh", 1, 1) + bytes(16)
    path = name.encode() + b"\0" * (len(name) % 2)
    record += struct.pack(">hh", 2, len(path)) + path + struct.pack(">hh", -1, 0)
    entry = b"alis" + bytes(4) + record
    entry = struct.pack(">I", len(entry) + 4) + entry
    table = struct.pack(">II", 0, 1) + entry
    table = struct.pack(">I", len(table) + 8) + b"dref" + table
    grown = len(table) - size
    data = data[:at] + table + data[at + size :]
    for box in (b"moov", b"trak", b"mdia", b"minf", b"dinf"):
        where = data.index(box) - 4
        length = struct.unpack(">I", data[where : where + 4])[0]
        data = data[:where] + struct.pack(">I", length + grown) + data[where + 4 :]
    return data


@contextmanager
def nobody_connects() -> Iterator[int]:
    """A TCP port of loopback that must get no connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server.getsockname()[1]
        try:
            connection, _ = server.accept()
        except BlockingIOError:
            return
        connection.close()
        raise AssertionError("somebody connected")


@contextmanager
def free_udp_port() -> Iterator[tuple[int, Callable[[], bool]]]:
    """A UDP port, and a function that says whether somebody has it open.

    It is kept by a socket of another address, so nobody else gets it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as keeper:
        keeper.bind(("127.0.0.99", 0))
        port = keeper.getsockname()[1]
        local = f":{port:04X} "

        def taken() -> bool:
            lines = Path("/proc/self/net/udp").read_text().splitlines()
            return sum(local in line for line in lines) > 1

        yield port, taken

"""Pictures for tests: deterministic, distinct per name, and served over HTTP."""

import base64
import hashlib
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


def random_of(name: str) -> np.random.Generator:
    """Numbers that no other name gives."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def picture(name: str, size: tuple[int, int] = (224, 224)) -> bytes:
    """A PNG that no other name gives."""
    coarse = random_of(name).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def blank_picture(side: int) -> bytes:
    """A PNG of a few kilobytes that unpacks to ``side`` squared pixels."""
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(png: bytes) -> str:
    """A PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


@contextmanager
def picture_server() -> Iterator[str]:
    """An HTTP server whose ``/<name>.png`` is :func:`picture` of that name."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").removesuffix(".png")
            if name.startswith("missing"):
                self.send_error(404)
                return
            body = picture(name)
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""What a launch script waits for, where its frontend asks for a key that the script has not got."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from examples.launch import launch_tools


class Guarded(BaseHTTPRequestHandler):
    """A frontend that says to everybody only that it is well."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        serving.join()


def test_where_a_frontend_does_not_say_whom_it_knows_the_worker_is_believed(
    url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("Starting to load model x\n")
    assert launch_tools.awaited([url], {"w0": log}) == "w0: loading weights"
    log.write_text("worker w0 serves x at tcp://127.0.0.1:1\n")
    assert launch_tools.awaited([url], {"w0": log}) == ""
    assert launch_tools.awaited([url], {}) == ""

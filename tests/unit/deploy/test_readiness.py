"""What the launcher waits for, where its frontend asks for a key that the script has not got."""

import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from common.launcher import frontend_access, readiness
from common.launcher.readiness import Place
from tests.certificates import Authority
from tests.ports import free_port


def awaited(url: str, worker: Path | None = None, log: Path | None = None) -> str:
    """What is not ready, in one line: a frontend with its log, and the worker w0 with its own."""
    left = readiness.awaited({"frontend": Place(url, log)}, {"w0": worker} if worker else {})
    return "; ".join(f"{name}: {doing}" for name, doing in left.items())


class Leaving(BaseHTTPRequestHandler):
    """Closes each connection instead of an answer."""

    def handle(self) -> None:
        self.connection.recv(1)


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
    with serving() as url:
        yield url


def test_where_a_frontend_does_not_say_whom_it_knows_the_worker_is_believed(
    url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("Starting to load model x\n")
    assert awaited(url, log) == "w0: loading weights"
    log.write_text("worker w0 serves x at tcp://127.0.0.1:1\n")
    assert awaited(url, log) == ""
    assert awaited(url) == ""


def test_nobody_listens() -> None:
    assert awaited(f"http://127.0.0.1:{free_port()}") == "frontend: it does not listen yet"


def test_a_model_that_its_frontend_can_not_serve_is_found_on_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO [frontend] frontend.models: loading the processor of /models/x\n")
    assert readiness.cannot_serve(None) == readiness.cannot_serve(log) == ""
    with log.open("a") as file:
        file.write("ERROR [frontend] frontend.models: model x can't be served: no such file\n")
        file.write("ERROR [frontend] frontend.workers.fleets: worker w0 refused\n")
    assert readiness.cannot_serve(log) == "model x can't be served: no such file"


def test_a_log_of_any_length_is_read_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: no page of it exists
        file.seek(0, os.SEEK_END)
        file.write(b"\nStarting to load model x\n")
    assert readiness.stage(log) == "loading weights"


def test_one_that_asks_for_a_certificate_is_ready_when_its_log_says_so(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.certify("127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    context.load_verify_locations(authority.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    log = tmp_path / "log"
    log.write_text("INFO [frontend] frontend.app: waiting for workers in /cards\n")
    for newest in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        context.maximum_version = newest
        with serving(context) as url:
            assert "it has no worker yet" in awaited(url, log=log)
            assert awaited(url) == ""
            with log.open("a") as file:
                file.write("INFO [frontend] frontend.models: serving demo\n")
            assert awaited(url, log=log) == ""
        log.write_text("INFO [frontend] frontend.app: waiting for workers in /cards\n")


def test_one_that_ends_meanwhile_asks_for_no_certificate(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(tmp_path / "ca").certify("127.0.0.1"))
    with serving(context, Leaving) as url:
        assert frontend_access.get(url, "/health")[0] == frontend_access.NOBODY


@contextmanager
def serving(
    context: ssl.SSLContext | None = None, kind: type[BaseHTTPRequestHandler] | None = None
) -> Iterator[str]:
    """A guarded frontend, over TLS with a context."""
    with Server(("127.0.0.1", 0), kind or Guarded) as server:
        if context is not None:
            # Each shakes hands in its own thread.
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class Server(ThreadingHTTPServer):
    """Says nothing of clients that it does not let in."""

    def handle_error(self, *_: object) -> None:
        pass

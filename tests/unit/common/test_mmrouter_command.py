"""``mmrouter``: what it starts, and the table of a fleet."""

import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from common.launcher.status import show_status
from tests.certificates import Authority
from tests.unit.frontend.http.views import gone, rank_view, view

KEY = "the-key-of-admins"


def mmrouter(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "common.cli.mmrouter", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([], 0, "usage: mmrouter COMMAND"),
        (["--version"], 0, "mmrouter 0."),
        (["frontend", "--help"], 0, "usage: mmrouter frontend"),
        (["worker", "--help"], 0, "usage: mmrouter worker"),
        (["worker", "model", "--max-model-le=1"], 2, "did you mean --max-model-len?"),
        (["doctor", "--help"], 0, "usage: mmrouter doctor [flags]\n\nSays what a frontend"),
        (
            ["doctor", "--prot=1"],
            2,
            "mmrouter doctor: error: --prot is unknown; did you mean --port?",
        ),
        (["fleet-key", "--help"], 0, "Make the key"),
        (["fleet-key"], 2, "arguments are required: new PATH"),
        (["status", "--help"], 0, "--admin-key-file FILE"),
        (["up", "--help"], 0, "usage: mmrouter up [MODEL]"),
        (["up", "/no/such"], 2, "error: there is no directory /no/such"),
        (["--completion", "bash"], 0, "complete -F _mmrouter mmrouter"),
        (["fronted"], 2, "command fronted is unknown; did you mean frontend?"),
        (["--versoin"], 2, "error: --versoin is unknown; did you mean --version?"),
    ],
)
def test_each_command_is_its_module(words: list[str], status: int, says: str) -> None:
    done = mmrouter(*words)
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr


class Frontend(BaseHTTPRequestHandler):
    """Answers with what the test has put there, for admins."""

    answers: ClassVar[dict[str, object]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {KEY}"
        if (place := self.answers.get("elsewhere")) is not None:
            self.send_response(302)
            self.send_header("Location", str(place))
            self.end_headers()
            self.asked.append(self.path)
            return
        self.send_response(200 if allowed else 401)
        self.end_headers()
        body = self.answers[self.path] if allowed else {"error": "show a key\x1b[2J"}
        self.wfile.write(json.dumps(body, ensure_ascii=False).encode())

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def frontend() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Frontend)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text(f"# of admins\n{KEY}\n")
    return str(tmp_path / "keys")


def test_health_in_words(frontend: str, key_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    workers = [
        view("w0", condition="serving", model="qwen"),
        view("w1", condition="asleep"),
        view("w2", condition="serving", circuit="open", circuit_reason="3 failures\n\x1b[31m"),
        view("w3", condition="serving", circuit="half-open"),
        view("w4", connected=False, transport=None, kv_usage=None, running=None),
        gone("w8", "lost", "it hung up"),
        gone("w9", "left", "it is shutting down"),
        view("w5", drained=True),
        view("w6", condition=None),
        view("w7", state="draining", condition="serving"),
        view("w10", condition="serving", ranks=[rank_view(busy=True)]),
        view("w11", condition="serving", ranks=[rank_view(busy=True), rank_view(rank=1)]),
    ]
    Frontend.answers = {
        "/mmrouter/workers": [each.model_dump() for each in workers],
        "/mmrouter/workers/refused": [
            {"worker_id": "w7", "reason": "worker w7 refused: another model"}
        ],
    }
    assert show_status(["--url", frontend, "--admin-key-file", key_file]) == 0
    out = capsys.readouterr().out
    head, *lines = out.splitlines()
    assert head.split()[:3] == ["WORKER", "MODEL", "HEALTH"]
    health = [
        "healthy", "asleep", "ejected: 3 failures", "on trial", "not connected",
        "lost 3 min ago", "left 3 min ago", "drained", "joining", "leaving", "busy", "healthy",
    ]  # fmt: skip
    for line, each in zip(lines, health, strict=False):
        assert each in line
    assert lines[0].split() == ["w0", "qwen", "healthy", "3", "0", "50%", "0", "shm"]
    assert lines[-3:] == [
        "refused: w7: another model",
        "lost 3 min ago: w8: it hung up",
        "left 3 min ago: w9: it is shutting down",
    ]
    assert out.replace("\n", "").isprintable()


def test_none_is_healthy(frontend: str, key_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ("/mmrouter/workers", "/mmrouter/workers/refused")
    Frontend.answers = {path: [] for path in paths}
    assert show_status([f"--url={frontend}", f"--admin-key-file={key_file}"]) == 1
    assert capsys.readouterr().out == "no workers\n"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("{frontend}", "needs a key: name a file with an admin key by --admin-key-file"),
        ("http://127.0.0.1:9", "no frontend of mmrouter answers at http://127.0.0.1:9: "),
        ("127.0.0.1:9", "a URL starts with http:// or https://"),
        ("http://[", "no frontend of mmrouter answers"),
    ],
)
def test_nobody_tells(
    frontend: str, url: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_status(["--url", url.format(frontend=frontend)]) == 2
    said = capsys.readouterr().err
    assert says in said and "\x1b" not in said


def test_another_key_is_refused(
    frontend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("of-a-user\n")
    assert show_status([f"--url={frontend}", f"--admin-key-file={tmp_path / 'keys'}"]) == 2
    assert f"refuses the first key of {tmp_path / 'keys'}" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "junk"])
def test_authorities_that_cannot_be_read(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    assert show_status(["--url=https://127.0.0.1:9", f"--ca-file={file}"]) == 2
    assert f"--ca-file={file} can't be used" in capsys.readouterr().err


def test_a_certificate_that_is_not_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = Authority(tmp_path / "ca").certify("127.0.0.1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    server = HTTPServer(("127.0.0.1", 0), Frontend)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    for scheme, says in (("https", "--ca-file names its CA"), ("http", "no frontend of mmrouter")):
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert show_status(["--url", f"{scheme}://127.0.0.1:{server.server_port}"]) == 2
        thread.join()
        assert says in capsys.readouterr().err
    server.server_close()


def test_another_program_is_no_frontend(
    frontend: str, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Frontend.answers = {"/mmrouter/workers": {"hello": "world"}}
    assert show_status([f"--url={frontend}", f"--admin-key-file={key_file}"]) == 2
    assert "no frontend of mmrouter answers" in capsys.readouterr().err


def test_a_key_goes_nowhere_else(
    frontend: str, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Frontend.answers, Frontend.asked = {"elsewhere": f"{frontend}/elsewhere"}, []
    assert show_status([f"--url={frontend}", f"--admin-key-file={key_file}"]) == 2
    assert "answers 302" in capsys.readouterr().err
    assert Frontend.asked == ["/mmrouter/workers"]


def test_a_server_that_speaks_no_http_does_nothing_to_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x1b[2J hello\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert show_status([f"--url=http://127.0.0.1:{server.getsockname()[1]}"]) == 2
        thread.join()
    assert "\x1b" not in capsys.readouterr().err


def test_a_key_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_status(["--admin-key-file=/nonexistent"]) == 2
    assert "/nonexistent" in capsys.readouterr().err

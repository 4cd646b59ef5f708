"""An interpreter for launch scripts whose frontends and workers are there at once.

    python -m tests.fakes.launched DIRECTORY

makes ``DIRECTORY/python``. Scripts call it as they call Python: it hands everything on to the real
one but ``-m frontend`` and ``-m backend_worker``, which it plays. What each was called with lies in
``DIRECTORY/calls``, for tests to give to the real command lines.
"""

import json
import os
import signal
import socket
import ssl
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, NamedTuple, cast

import yaml

PASSED_ON: Final = ("DYNAMO_MM_TRANSFER", "CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE")


class Call(NamedTuple):
    """How a process was started.

    Attributes:
        module: ``frontend`` or ``backend_worker``.
        argv: behind it.
        environment: what there was of ``PASSED_ON``.
    """

    module: str
    argv: list[str]
    environment: dict[str, str]

    def value(self, flag: str) -> str:
        """Of a flag with a value, in either form."""
        return next(
            word.partition("=")[2] or behind
            for word, behind in zip(self.argv, [*self.argv[1:], ""], strict=True)
            if word.partition("=")[0] == flag
        )

    def has(self, flag: str) -> bool:
        """Whether a flag was given."""
        return any(word.partition("=")[0] == flag for word in self.argv)


def model_at(directory: Path) -> Path:
    """What looks like a model."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen2_vl"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (directory / name).write_text("{}")
    return directory


def interpreter(directory: Path) -> Path:
    """Make one."""
    path = directory / "python"
    root = Path(__file__).parents[2]
    path.write_text(
        f"#!/bin/sh\n"
        # vLLM's CPU build is there, unless a test wants another one.
        f'case "$PLAYED_BUILD $2" in "cuda common.launcher") shift 2; exec {sys.executable} -c '
        f'"import common.launcher.devices as d; d._is_cpu_build = lambda: False; '
        f'from common.launcher.__main__ import main; main()" "$@";; esac\n'
        f"case $2 in frontend|backend_worker)\n"
        f'cd {root} && exec {sys.executable} -m tests.fakes.launched {directory} "$@";;\nesac\n'
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    (directory / "calls").mkdir()
    return path


def calls(directory: Path, module: str) -> list[Call]:
    """What was started of a module, in that order."""
    found = [
        Call(*json.loads(path.read_text())) for path in sorted((directory / "calls").iterdir())
    ]
    return [call for call in found if call.module == module]


def living(mark: str) -> list[int]:
    """Processes that inherited a variable ``MARK`` with this value, zombies left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"MARK={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
            if marked and ") Z " not in (process / "stat").read_text():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def _play(directory: Path, call: Call) -> None:
    name = f"{time.monotonic_ns():020}-{os.getpid()}"
    (directory / "calls" / name).write_text(json.dumps(call))
    cards = Path(call.value("--discovery"))
    if "stubborn" in call.argv[0]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if call.module == "frontend":
        _serve(call, cards)
    elif "broken" in call.value("--model"):
        sys.exit("ValueError: max_model_len is too large")
    else:
        (cards / call.value("--worker-id")).touch()
        print(f"worker {call.value('--worker-id')} serves a model at tcp://127.0.0.1:1", flush=True)
        time.sleep(600)


def _serve(call: Call, cards: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/health" and not self._has_key():
                self._answer({}, 401)
                return
            workers = [{"worker_id": path.name, "gone_at": None} for path in cards.iterdir()]
            body: dict[str, object] = {
                "/v1/models": {"data": [{"id": "demo"}]},
                "/mmrouter/workers": workers,
            }
            self._answer(body.get(self.path, {}), 200 if workers else 503)

        def _has_key(self) -> bool:
            if not call.has("--api-key-file"):
                return True
            keys = Path(call.value("--api-key-file")).read_text().split()
            return self.headers.get("Authorization", "").removeprefix("Bearer ") in keys

        def address_string(self) -> str:
            return "a client"  # on a Unix socket it has no address

        def do_POST(self) -> None:
            if not self._has_key():
                self._answer({}, 401)
                return
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer({"content": "played"}, 200)

        def _answer(self, body: object, status: int) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    server = _server(call, Handler)
    if call.has("--ssl-certfile"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(call.value("--ssl-certfile"), call.value("--ssl-keyfile"))
        if "--ssl-cert-reqs=2" in call.argv:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(call.value("--ssl-ca-certs"))
        # Each connection shakes hands in its own thread, as one that never does must not hold all.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    print("INFO [frontend] frontend.models: serving demo", flush=True)
    server.serve_forever()


def _server(call: Call, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    if call.has("--uds"):
        server = ThreadingHTTPServer(("", 0), handler, bind_and_activate=False)
        server.socket = socket.socket(socket.AF_UNIX)
        server.socket.bind(call.value("--uds"))
        server.server_activate()
        return server
    host, port = call.value("--host"), int(call.value("--port"))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("Server", (ThreadingHTTPServer,), {"address_family": family})
    return cast("ThreadingHTTPServer", kind((host, port), handler))


if __name__ == "__main__":
    said = sys.argv[4:]
    if "--config" in said:
        file = yaml.safe_load(Path(said[said.index("--config") + 1]).read_text())
        said += [f"--{flag}={value}" for flag, value in file.items()]
    given = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    _play(Path(sys.argv[1]), Call(sys.argv[3], said, given))

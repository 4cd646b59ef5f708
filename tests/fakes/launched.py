"""An interpreter for launch scripts whose frontends and workers are there at once.

    python -m tests.fakes.launched DIRECTORY

makes ``DIRECTORY/python``. Scripts call it as they call Python: it hands everything on to the real
one but ``-m frontend`` and ``-m backend_worker``, which it plays. What each was called with lies in
``DIRECTORY/calls``, for tests to give to the real command lines.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, NamedTuple

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
        """Of a flag with a value behind it."""
        return self.argv[self.argv.index(flag) + 1]


def interpreter(directory: Path) -> Path:
    """Make one."""
    path = directory / "python"
    root = Path(__file__).parents[2]
    path.write_text(
        f"#!/bin/sh\ncase $2 in frontend|backend_worker)\n"
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


def _play(directory: Path, call: Call) -> None:
    name = f"{time.monotonic_ns():020}-{os.getpid()}"
    (directory / "calls" / name).write_text(json.dumps(call))
    cards = Path(call.value("--discovery-dir"))
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
            if "--api-key-file" in call.argv and self.path != "/health":
                self._answer({}, 401)
                return
            workers = [{"worker_id": path.name} for path in cards.iterdir()]
            body: dict[str, object] = {
                "/v1/models": {"data": [{"id": "demo"}]},
                "/mmrouter/workers": workers,
            }
            self._answer(body.get(self.path, {}), 200 if workers else 503)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer({"content": "played"}, 200)

        def _answer(self, body: object, status: int) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    place = (call.value("--host"), int(call.value("--port")))
    ThreadingHTTPServer(place, Handler).serve_forever()


if __name__ == "__main__":
    given = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    _play(Path(sys.argv[1]), Call(sys.argv[3], sys.argv[4:], given))

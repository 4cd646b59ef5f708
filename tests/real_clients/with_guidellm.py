"""guidellm: synthetic texts and pictures."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, main

case = Cases()
TEXT = {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": 8}
IMAGE = {"kind": "synthetic_image", "width": 112, "height": 112, "output_tokens": 8}


def benchmark(at: Endpoint, route: str, *data: object) -> object:
    """Requests that were answered."""
    backend = {"kind": "openai_http", "target": at.url, "model": at.model, "api_key": at.key}
    tokenizer = {"kind": "huggingface_auto", "model": os.environ["DEMO_MODEL"]}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        asked = [
            ("backend", backend | {"request_format": route}),
            ("profile", {"kind": "synchronous"}),
            ("constraint", {"kind": "max_requests", "count": 6}),
            ("tokenizer", tokenizer),
            ("output", {"kind": "json", "path": str(report)}),
            *(("data", each) for each in data),
        ]
        flags = [f"--{name}={json.dumps(value)}" for name, value in asked]
        done = subprocess.run(
            [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console", *flags],
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode or not report.exists():
            raise RuntimeError((done.stdout + done.stderr)[-1500:])
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    if totals["errored"] or totals["successful"] != 6:
        raise RuntimeError(json.dumps(totals))
    return totals["successful"]


@case
def text(at: Endpoint) -> object:
    return benchmark(at, "/v1/chat/completions", TEXT)


@case
def pictures(at: Endpoint) -> object:
    return benchmark(at, "/v1/chat/completions", TEXT, IMAGE)


@case
def completions(at: Endpoint) -> object:
    return benchmark(at, "/v1/completions", TEXT)


@case
def responses_with_pictures(at: Endpoint) -> object:
    return benchmark(at, "/v1/responses", TEXT, IMAGE)


if __name__ == "__main__":
    main(case, {"guidellm": version("guidellm")})

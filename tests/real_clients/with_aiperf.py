"""NVIDIA's aiperf: synthetic texts and pictures, as streams."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.e2e.clients.programs.outcomes import Cases, Endpoint, main

case = Cases()
IMAGES = ("--image-width-mean=112", "--image-height-mean=112", "--image-format=png")


def profile(at: Endpoint, kind: str, *flags: str) -> object:
    """Requests, and errors by their text."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "aiperf"), "profile", f"--model={at.model}",
                f"--url={at.url}", f"--api-key={at.key}", f"--endpoint-type={kind}",
                f"--tokenizer={os.environ['DEMO_MODEL']}", "--streaming", "--request-count=6",
                "--concurrency=2", "--synthetic-input-tokens-mean=32", "--output-tokens-mean=8",
                "--ui=none", f"--artifact-dir={folder}", *flags,
            ],
            # With it a directory is looked for in the hub's cache.
            env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
            capture_output=True,
            text=True,
            timeout=300,
        )  # fmt: skip
        reports = list(Path(folder).rglob("profile_export_aiperf.json"))
        if done.returncode or not reports:
            raise RuntimeError((done.stdout + done.stderr)[-1500:])
        report = json.loads(reports[0].read_text())
    if report.get("error_summary") or report["request_count"]["avg"] != 6:
        raise RuntimeError(json.dumps(report.get("error_summary"))[:1500])
    return report["request_count"]["avg"]


@case
def text(at: Endpoint) -> object:
    return profile(at, "chat")


@case
def pictures(at: Endpoint) -> object:
    return profile(at, "chat", *IMAGES)


@case
def completions(at: Endpoint) -> object:
    return profile(at, "completions")


@case
def responses_with_pictures(at: Endpoint) -> object:
    return profile(at, "responses", *IMAGES)


if __name__ == "__main__":
    main(case, {"aiperf": version("aiperf")})

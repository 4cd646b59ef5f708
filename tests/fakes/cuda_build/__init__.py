"""Processes in which vLLM takes itself for its CUDA build, over the libraries of a build for CPU.

vLLM decides by the version in its metadata: ``0.32.0`` is the CUDA build's, ``0.32.0+cpu`` the
other's. A directory in front of all others on the search path has that of the CUDA build, and notes
whoever initialises CUDA.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from common.vllm_compat.features import INSTALLED
from tests.fakes.cuda_build.sitecustomize import GPUS, TRAP


@dataclass(frozen=True)
class CudaBuild:
    """Such a build.

    Attributes:
        environment: of the processes that have it.
        trap: file with the process and the stack of each initialisation of CUDA.
    """

    environment: dict[str, str]
    trap: Path

    def initialised(self) -> str:
        """Who initialised CUDA; empty if nobody did."""
        return self.trap.read_text() if self.trap.exists() else ""


def make_cuda_build(directory: Path, *, gpus: int = 0) -> CudaBuild:
    """Make one in a directory that is there.

    Args:
        gpus: how many the driver seems to have. There is none to compute on.
    """
    about = directory / f"vllm-{INSTALLED}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {INSTALLED}\n")
    trap = directory / "cuda.log"
    path = (str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, path)), TRAP: str(trap)}
    return CudaBuild(environment | ({GPUS: str(gpus)} if gpus else {}), trap)

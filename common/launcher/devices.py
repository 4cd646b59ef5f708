"""Devices of this machine's workers: its GPUs, or a CPU."""

import itertools
import os
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Self

from common.errors import ConfigurationError


@dataclass(frozen=True)
class Devices:
    """GPUs to distribute, ``per_worker`` each, by number or UUID; none for a CPU. With ``single``
    all workers share the first."""

    gpus: list[str]
    single: bool
    per_worker: int

    @classmethod
    def find(cls, *, single: bool, per_worker: int) -> Self:
        return cls([] if _is_cpu_build() else _gpus(), single, per_worker)

    @property
    def fitting(self) -> int:
        """Default number of workers."""
        return 2 if not self.gpus or self.single else max(1, len(self.gpus) // self.per_worker)

    def check(self, workers: int) -> None:
        """Raise ConfigurationError if there are too few GPUs."""
        if not workers or not self.gpus or self.single:
            return
        if workers * self.per_worker > len(self.gpus):
            raise ConfigurationError(
                f"{workers} workers need {workers * self.per_worker} GPUs and there are "
                f"{len(self.gpus)}: start fewer with --workers, or pack them on one with "
                "--single-gpu"
            )
        if self.per_worker > 1 and any(gpu.startswith("MIG-") for gpu in self.gpus):
            raise ConfigurationError(
                f"a process can use one MIG instance only, and each worker was to have "
                f"{self.per_worker}"
            )

    def flags(self, workers: int) -> list[str]:
        """Return engine flags that precede the user's."""
        if not self.gpus:
            # As long a context as the model has, or as fits into memory.
            return ["--enforce-eager", "--dtype=float32", "--max-model-len=auto", "--block-size=32"]
        if self.single and workers:
            return [f"--gpu-memory-utilization={0.9 / workers:.3f}"]
        return []

    def environment(self, number: int) -> dict[str, str]:
        """Return the environment variables of worker ``number``."""
        if not self.gpus:
            return {
                "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
                "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
                # vLLM compiles a helper of `logprobs` even with --enforce-eager. That takes about
                # 20 s, and ends the engine if there is no C++ compiler.
                "TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE", "1"),
            }
        first = 0 if self.single else number * self.per_worker
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[first : first + self.per_worker])}

    def __str__(self) -> str:
        if not self.gpus:
            return "a CPU"
        return f"GPU {self.gpus[0]} together" if self.single else f"{len(self.gpus)} GPUs"


def _is_cpu_build() -> bool:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def _gpus() -> list[str]:
    """Return values for CUDA_VISIBLE_DEVICES, one per MIG instance of a divided GPU."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA ignores all devices from the first invalid one on.
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    found: list[str] = []
    for line in listed.stdout.splitlines():
        if gpu := re.match(r"GPU (\d+): ", line):
            found.append(gpu[1])
        elif instance := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line):
            if found and found[-1].isdigit():
                found.pop()  # as a whole it is its first instance
            found.append(instance[1])
    return found

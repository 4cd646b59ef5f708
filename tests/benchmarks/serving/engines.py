"""What all contenders have: engines whose GPU is the clock, or real ones on the CPU."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.simgpu.gpu import GpuModel
from tests.simgpu.start import EXECUTOR
from tests.simgpu.stats import FOLDER_VARIABLE

_AS_ON_A_GPU: Final = ("--max-num-batched-tokens=8192", "--max-num-seqs=1024")
"""What ``vllm serve`` takes on the GPU that is modelled; on CPUs it is a quarter and an eighth. The
encoder cache holds as many tokens as a step may have: eight pictures, and not two.
"""


@dataclass(frozen=True)
class Engines:
    """Of each contender.

    Attributes:
        count: how many.
        gpu: how fast they are; None where a real model computes.
        slower: of that speed, what every second engine has.
        more: flags of vLLM's.
    """

    count: int
    gpu: GpuModel | None
    slower: float = 1.0
    more: tuple[str, ...] = ()

    @property
    def speed(self) -> float | None:
        """Of the GPUs, 1 is an H100's; None where there is none."""
        return self.gpu.speed if self.gpu else None

    @property
    def flags(self) -> tuple[str, ...]:
        """What they are started with, beside what all engines of the tests have."""
        return (*((EXECUTOR, *_AS_ON_A_GPU) if self.gpu else ()), *self.more)

    def env(self, number: int, totals: Path) -> dict[str, str]:
        """The same, environment variables of one of them.

        Args:
            totals: the folder where they tell what they did.
        """
        if self.gpu is None:
            return {}
        gpu = replace(self.gpu, speed=self.gpu.speed * self.slower) if number % 2 else self.gpu
        return gpu.to_env() | {FOLDER_VARIABLE: str(totals)}

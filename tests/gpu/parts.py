"""The parts of a run: the program of each, and the time that it gets."""

from dataclasses import dataclass, replace
from typing import Final

from tests.gpu.results import Copies, Fleet, Kernels, Reads, Result

CUDA: Final = "cuda"
CPU: Final = "cpu"
STOPPING_S: Final = 30
"""What a fleet has for stopping its processes, of the time of its part."""


@dataclass(frozen=True)
class Part:
    """One program, which prints its result as its last line.

    Attributes:
        module: below ``tests.gpu``.
        gives: the type of its result.
        least_s: a part does not start with less time left.
        most_s: a part that has not ended after this time is killed.
        arguments: beside those that each program of its kind gets.
        starts_engines: whether it needs the model and the flags that ``kernels`` chose.
    """

    name: str
    module: str
    gives: type[Result]
    least_s: int
    most_s: int
    arguments: tuple[str, ...] = ()
    starts_engines: bool = False


def _fleet(name: str, dtype: str, steps: str, least_s: int, most_s: int, *more: str) -> Part:
    arguments = (f"--dtype={dtype}", f"--steps={steps}", *more)
    return Part(name, "fleet", Fleet, least_s, most_s, arguments, starts_engines=True)


_H2D: Final = Part("h2d", "host_to_device", Copies, 20, 40)
_NIXL: Final = Part("nixl", "nixl_reads", Reads, 30, 60)

PARTS: Final[dict[str, tuple[Part, ...]]] = {
    CUDA: (
        Part("kernels", "kernels", Kernels, 30, 100),
        _fleet("bfloat16", "bfloat16", "answers,first_tokens,encodings", 120, 220),
        _H2D,
        _NIXL,
        _fleet("float32", "float32", "answers", 90, 150),
        # Compiled, and with CUDA graphs: rarely within 420 s beside the others.
        _fleet("graphs", "bfloat16", "answers,first_tokens", 160, 300, "--graphs"),
    ),
    CPU: (
        # Other processes may take most of the cores.
        _fleet("float32", "float32", "answers,first_tokens", 120, 600, "--rounds=2"),
        replace(_H2D, most_s=150),
        replace(_NIXL, most_s=150),
    ),
}
"""By device, in the order in which they run. Those of a CPU rehearse the programs."""

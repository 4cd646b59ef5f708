"""``python -m tests.gpu.kit.pins NAME...``: requirements with hashes, from the lock for CUDA.

Without names: those of ``packages.txt``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from setup.locks import CUDA, Pin, environments, for_environment, read

PYTHON: Final = "3.12"
PACKAGES: Final = Path(__file__).with_name("packages.txt")


def names() -> list[str]:
    """The packages that the kit carries, beside vLLM and NIXL."""
    lines = PACKAGES.read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def pins(wanted: Sequence[str]) -> list[str]:
    """A line of pip's for each package. Raises KeyError for one that the lock does not have."""
    (environment,) = (
        each
        for each in environments()
        if (each["python_version"], each["platform_machine"]) == (PYTHON, "x86_64")
    )
    locked = for_environment(read(CUDA.path.read_text()), environment)
    return [_line(name, locked[name]) for name in wanted]


def _line(name: str, pin: Pin) -> str:
    """Without the pin's marker, which pip would hold against the Python that downloads."""
    return " ".join((f"{name}=={pin.version}", *(f"--hash=sha256:{each}" for each in pin.hashes)))


if __name__ == "__main__":
    print("\n".join(pins(sys.argv[1:] or names())))

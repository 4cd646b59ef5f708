"""What each interpreter of :mod:`tests.fakes.cuda_build` runs first, of the standard library only.

Writes to a file who initialises CUDA, and lets nobody; answers for a driver if it is to have GPUs.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

TRAP: Final = "CUDA_TRAP"
"""Variable that names the file."""

GPUS: Final = "CUDA_FAKE_GPUS"
"""Variable that says how many GPUs the driver has."""

_INITIALISE: Final = ("_lazy_init", "set_device")
"""Functions of PyTorch by which all others do it."""


class _After(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls a function with a module right after it was loaded."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)


class _NoKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An empty module in place of the CUDA build's kernels, where there are none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "vllm._C_stable_libtorch":
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _set_trap(cuda: ModuleType) -> None:
    for name in _INITIALISE:
        setattr(cuda, name, _trap())


def _trap() -> Callable[..., None]:
    """One for each name, since PyTorch keeps them by identity."""

    def trapped(*_: object, **__: object) -> None:
        stack = "".join(traceback.format_stack())
        with Path(os.environ[TRAP]).open("a") as file:
            file.write(f"process {os.getpid()}, {' '.join(sys.argv)}\n{stack}\n")
        raise RuntimeError("CUDA must not be initialised here")

    return trapped


def _fake_driver(nvml: ModuleType) -> None:
    """As far as vLLM asks it."""
    memory = SimpleNamespace(total=80 << 30, free=80 << 30, used=0)
    answers: dict[str, Callable[..., object]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: int(os.environ[GPUS]),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
        "nvmlDeviceGetName": lambda _: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
        "nvmlDeviceGetMemoryInfo": lambda _: memory,
    }
    vars(nvml).update(answers)


if TRAP in os.environ:
    sys.meta_path.insert(0, _After("torch.cuda", _set_trap))
if GPUS in os.environ:
    sys.meta_path.insert(0, _After("vllm.third_party.pynvml", _fake_driver))
    sys.meta_path.append(_NoKernels())

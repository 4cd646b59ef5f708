"""Copies of a picture's tensors from shared memory to the GPU, in four ways.

    python -m tests.gpu.host_to_device [--device cuda]

Answers whether a worker could gain by registering the frontend's arena with CUDA, and what becomes
of its private mapping then. Prints one JSON line, a :class:`tests.gpu.results.Copies`.
"""

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch

from tests.gpu.line import PICTURE
from tests.gpu.results import Copies

ARENA: Final = 512 << 20
PICTURE_BYTES: Final = 1369 * 4 * 1176
SIZES: Final = {
    PICTURE: PICTURE_BYTES,
    "picture_bfloat16": 2 * PICTURE_BYTES,
    "64MiB": 64 << 20,
}
REPEAT: Final = 20
_WARM_UP: Final = 5
_PAGE: Final = mmap.PAGESIZE

Way = Callable[[Any], object]
"""Copies one item of the arena, a tensor, to the device."""


class Timer:
    """Times copies of one item after the other, so that none is in the CPU's caches."""

    def __init__(self, device: str, size: int) -> None:
        self._synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        self._size = size

    def gb_s(self, arena: Any, copy: Way) -> float:
        """The rate of the median copy."""
        count, seconds = ARENA // self._size, []
        for n in range(_WARM_UP + REPEAT):
            item = arena[n % count * self._size :][: self._size]
            self._synchronize()
            began = time.perf_counter()
            copy(item)
            self._synchronize()
            seconds.append(time.perf_counter() - began)
        return round(self._size / statistics.median(seconds[_WARM_UP:]) / 1e9, 2)


def map_arena() -> tuple[mmap.mmap, mmap.mmap]:
    """Shared memory, filled, as a frontend maps it and as a worker does: privately on write."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, ARENA)
        shared = mmap.mmap(file.fileno(), ARENA, access=mmap.ACCESS_WRITE)
        private = mmap.mmap(file.fileno(), ARENA, access=mmap.ACCESS_COPY)
    torch.frombuffer(shared, dtype=torch.uint8).random_(0, 255)
    return shared, private


def measure(device: str) -> Copies:
    """All ways, for each size."""
    shared, private = map_arena()
    mappings = {"shared": shared, "private": private}
    arena = torch.frombuffer(private, dtype=torch.uint8)
    gb_s: dict[str, dict[str, float | None]] = {}
    for name, size in SIZES.items():
        timer = Timer(device, size)
        target = torch.empty(size, dtype=torch.uint8, device=device)
        gb_s[name] = {
            "pageable": timer.gb_s(arena, target.copy_),
            "pinned": None,
            "staged": timer.gb_s(arena, _stage(target, pin=device == "cuda")),
            "registered": None,
            "registered_private": None,
        }
        if device == "cuda":
            pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            gb_s[name]["pinned"] = timer.gb_s(arena, _copy_of(pinned, target))
    register_ms, detached = {}, []
    if device == "cuda":
        for kind, mapping in mappings.items():
            register_ms[kind] = _register(mapping)
            if not _shows_writes(shared, mapping):
                detached.append(kind)
            registered = torch.frombuffer(mapping, dtype=torch.uint8)
            for name, size in SIZES.items():
                target = torch.empty(size, dtype=torch.uint8, device=device)
                way = "registered" if kind == "shared" else f"registered_{kind}"
                gb_s[name][way] = Timer(device, size).gb_s(registered, _copy(target))
            _unregister(mapping)
    return Copies(gb_s, register_ms, detached)


def _copy(target: Any) -> Way:
    return lambda item: target.copy_(item, non_blocking=True)


def _copy_of(source: Any, target: Any) -> Way:
    return lambda item: target.copy_(source, non_blocking=True)


def _stage(target: Any, *, pin: bool) -> Way:
    """As vLLM does with each item: into new pinned memory, and from there to the device."""

    def copy(item: Any) -> None:
        staged = item.new_empty(item.shape, pin_memory=pin).copy_(item)
        target.copy_(staged, non_blocking=True)

    return copy


def _register(mapping: mmap.mmap) -> float:
    """Register memory with CUDA; milliseconds."""
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    began = time.perf_counter()
    code = int(torch.cuda.cudart().cudaHostRegister(address, ARENA, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister failed with {code}")
    return round((time.perf_counter() - began) * 1e3, 2)


def _unregister(mapping: mmap.mmap) -> None:
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    torch.cuda.cudart().cudaHostUnregister(address)


def _shows_writes(shared: mmap.mmap, mapping: mmap.mmap) -> bool:
    """Whether a mapping shows what the owner of the memory writes."""
    shared[_PAGE] ^= 255
    return shared[_PAGE] == mapping[_PAGE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    sys.stdout.buffer.write(msgspec.json.encode(measure(options.device)) + b"\n")


if __name__ == "__main__":
    main()

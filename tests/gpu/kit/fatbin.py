"""``python -m tests.gpu.kit.fatbin SOURCE TARGET``: keep a library's GPU code for Hopper alone.

Payloads for other architectures become zeros, which compress to nothing; size and layout stay. The
CUDA driver reads the header beside a payload first, so it never reads one that was emptied.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

HOPPER: Final = 90
"""The architecture that NVIDIA calls sm_90."""

MAGIC: Final = 0xBA55ED50
SECTION: Final = b".nv_fatbin"
ELF: Final = 2
"""The kind of a payload of machine code; others hold PTX, which would be compiled at first use."""

_SECTION_HEADER: Final = struct.Struct("<IIQQQQIIQQ")


class Payload(NamedTuple):
    """GPU code of one architecture."""

    start: int
    size: int
    kind: int
    architecture: int


class FatbinError(ValueError):
    """A library without GPU code."""


def payloads(library: bytes) -> Iterator[Payload]:
    """All GPU code of a library. Raises FatbinError if it has no section for it."""
    at, end = _section(library)
    while at + 16 <= end:
        magic, _, header_size, total = struct.unpack_from("<IHHQ", library, at)
        if magic != MAGIC:
            at += 8  # padding between the fatbins of two objects
            continue
        entry, at = at + header_size, at + header_size + total
        while entry < at:
            kind, _, entry_size, size = struct.unpack_from("<HHIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            yield Payload(entry + entry_size, size, kind, architecture)
            entry += entry_size + size


def keep_hopper(library: bytes) -> bytes:
    """The library with zeros in place of all GPU code that Hopper does not run."""
    kept = bytearray(library)
    for start, size, kind, architecture in payloads(library):
        if (kind, architecture) != (ELF, HOPPER):
            kept[start : start + size] = bytes(size)
    return bytes(kept)


def _section(library: bytes) -> tuple[int, int]:
    """Begin and end of the GPU code."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_size, count, names_at = struct.unpack_from("<HHH", library, 0x3A)
    headers = [_SECTION_HEADER.unpack_from(library, table + n * entry_size) for n in range(count)]
    names = headers[names_at][4]
    for header in headers:
        name = names + header[0]
        if library[name : library.index(b"\0", name)] == SECTION:
            return header[4], header[4] + header[5]
    raise FatbinError(f"the library has no section {SECTION.decode()}")


def main(source: Path, target: Path) -> None:
    library = source.read_bytes()
    kept = keep_hopper(library)
    target.write_bytes(kept)
    zeros = sum(p.size for p in payloads(library) if (p.kind, p.architecture) != (ELF, HOPPER))
    print(f"{target.name}: {zeros >> 20} MiB of other architectures left out")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Tensors of clients: what is read, and what costs no more than it has bytes."""

import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import torch
from vllm.multimodal.media import AudioEmbeddingMediaIO, ImageEmbeddingMediaIO

from common.media.decoder_guard import guard_decoders
from common.media.tensor_files import MAX_RECORDS, TensorFileError, load
from tests.e2e.processes import run_python


def saved(value: object, **options: bool) -> bytes:
    """Return the bytes of ``torch.save``."""
    file = BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def rewritten(
    pickled: bytes | None = None, method: int = zipfile.ZIP_STORED, data: bytes | None = None
) -> bytes:
    """Return the file of a small tensor with other records."""
    made = BytesIO()
    plain = zipfile.ZipFile(BytesIO(saved(torch.ones(2, 2))))
    with plain as old, zipfile.ZipFile(made, "w", method) as new:
        for name in old.namelist():
            content = old.read(name)
            if pickled is not None and name.endswith("data.pkl"):
                content = pickled
            if data is not None and name.endswith("data/0"):
                content = data
            new.writestr(name, content)
    return made.getvalue()


def called(name: bytes, number: int) -> bytes:
    """Return a pickle that calls something with a number."""
    return b"\x80\x02c" + name + b"\n\x8a\x06" + number.to_bytes(6, "little") + b"\x85R."


_TENSOR = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
_STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + b"0X\x03\0\0\0cpuK\x04tQ"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12.0).reshape(3, 4).T,
        torch.randn(4, 6).to(torch.bfloat16)[1:, 2:],
        torch.randn(2, 3, dtype=torch.float16),
        torch.arange(6).reshape(2, 3),
        torch.zeros(0, 5),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
    ids=["rows", "columns", "a part", "half", "numbers", "nothing", "a parameter"],
)
def test_what_torch_save_writes_is_read(tensor: torch.Tensor) -> None:
    read = load(saved(tensor))
    assert read.dtype == tensor.dtype
    assert torch.equal(read, tensor)


HOSTILE = {
    "no numbers": saved(torch.full((2, 2), float("nan"))),
    "infinite numbers": saved(torch.full((2, 2), float("-inf"), dtype=torch.bfloat16)),
    "a call that reserves memory": rewritten(called(b"builtins\nbytearray", 1 << 36)),
    "a call of a storage": rewritten(called(b"torch\nFloatStorage", 1 << 34)),
    "an opcode that reserves memory": rewritten(b"\x80\x05\x96" + (1 << 36).to_bytes(8, "little")),
    "a large place": rewritten(b"\x80\x02Nr" + (0xFFFFFFF0).to_bytes(4, "little") + b"."),
    "deflated": rewritten(method=zipfile.ZIP_DEFLATED, data=bytes(1 << 20)),
    "strides of 0": saved(torch.zeros(1).expand(1 << 15, 1 << 15)),
    "sparse": saved(
        torch.sparse_coo_tensor([[0], [0]], [1.0], (1 << 20, 1 << 20), check_invariants=True)
    ),
    "a shape that is none": rewritten(
        _TENSOR + _STORAGE + b"K\0J\0\0\0\x40K\1K\2\x86\x86K\1K\1\x86\x89)tR."
    ),
    "another object": saved({"a": torch.ones(1)}),
    "the older format": saved(torch.ones(1), _use_new_zipfile_serialization=False),
    "a long directory": b"PK\x01\x02" * (MAX_RECORDS + 1),
    "cut off": saved(torch.ones(64, 64))[:-100],
    "no file": b"x" * 100,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_hostile_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(TensorFileError, match=r"^its? "):
        load(data)


def test_it_takes_no_memory(tmp_path: Path) -> None:
    for name, data in HOSTILE.items():
        (tmp_path / name).write_bytes(data)
    # A process of its own, since what a process may have can't be raised again.
    program = f"""
import resource, pathlib
from common.media.tensor_files import TensorFileError, load
files = [file.read_bytes() for file in sorted(pathlib.Path({str(tmp_path)!r}).iterdir())]
had = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for data in files:
    try:
        load(data)
    except TensorFileError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - had)
"""
    told = run_python("-c", program)
    assert told.returncode == 0 and int(told.stdout.splitlines()[-1]) < 64 << 10, "KiB"


@pytest.mark.parametrize(
    "read", [ImageEmbeddingMediaIO().load_bytes, AudioEmbeddingMediaIO().load_bytes]
)
def test_vllms_loaders_read_so(read: Callable[[bytes], torch.Tensor]) -> None:
    guard_decoders()
    assert torch.equal(read(saved(torch.ones(2, 3))), torch.ones(2, 3))
    with pytest.raises(TensorFileError, match="not read here"):
        read(HOSTILE["a call that reserves memory"])

"""The archive for a machine with a GPU is made from files and packages that exist."""

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.kit.fatbin import ELF, HOPPER, MAGIC, FatbinError, keep_hopper, payloads
from tests.gpu.kit.libraries import needed
from tests.gpu.kit.pins import names, pins

ROOT = Path(__file__).parents[3]
KIT = ROOT / "tests" / "gpu" / "kit"


def test_the_lock_has_each_package() -> None:
    assert len(pins([*names(), "vllm", "nixl", "nixl-cu13"])) > 50
    assert names() == sorted(set(names()))


def test_a_pin_names_one_version_and_hashes() -> None:
    (pin,) = pins(["msgspec"])
    assert re.fullmatch(r"msgspec==[\d.]+( --hash=sha256:[0-9a-f]{64})+", pin)
    with pytest.raises(KeyError):
        pins(["no-such-package"])


def test_what_the_scripts_name_exists() -> None:
    script = (KIT / "make_kit.sh").read_text()
    (archived,) = re.findall(r"git archive HEAD (.*?) \|", script)
    assert [name for name in archived.split() if not (ROOT / name).exists()] == []
    modules = re.findall(r"-m (tests\.gpu[\w.]*)", script + (KIT / "run.sh").read_text())
    assert len(modules) > 3
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("script", ["make_kit.sh", "run.sh"])
def test_bash_can_read_the_scripts(script: str) -> None:
    subprocess.run(["bash", "-n", KIT / script], check=True)


def test_the_stubs_have_what_vllm_takes_from_the_libraries() -> None:
    asks = (
        "import av, soundfile; av.error.FFmpegError; soundfile.LibsndfileError; "
        "soundfile.SoundFile; assert 'WAV' in soundfile.available_formats()"
    )
    stubs = KIT / "stubs"
    subprocess.run([sys.executable, "-S", "-c", asks], check=True, env={"PYTHONPATH": str(stubs)})


def test_frontends_and_workers_can_be_imported_with_the_stubs() -> None:
    asks = "import av, backend_worker.worker, frontend.app; assert 'stubs' in av.__file__"
    path = os.pathsep.join([str(KIT / "stubs"), str(ROOT)])
    subprocess.run([sys.executable, "-c", asks], check=True, env=os.environ | {"PYTHONPATH": path})


def fatbin(*payloads: tuple[int, int, bytes]) -> bytes:
    """GPU code of one object, by kind and architecture."""
    entries = b"".join(
        struct.pack("<HHIQ8xHHII", kind, 0, 64, len(code), 0, 0, architecture, 0).ljust(64, b"\0")
        + code
        for kind, architecture, code in payloads
    )
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(entries)) + entries


def library(section: bytes, name: bytes = b".nv_fatbin") -> bytes:
    """An ELF file with one section beside that of names."""
    section_names = b"\0" + name + b"\0"
    names_at, table_at = 64 + len(section), 64 + len(section) + len(section_names)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, table_at)
    struct.pack_into("<HHH", head, 0x3A, 64, 2, 1)
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", name_at, 0, 0, 0, start, size, 0, 0, 0, 0)
        for name_at, start, size in ((1, 64, len(section)), (0, names_at, len(section_names)))
    )
    return bytes(head) + section + section_names + table


def test_only_code_for_hopper_is_kept() -> None:
    ptx = ELF - 1
    one = fatbin((ELF, 80, b"ampere.."), (ELF, HOPPER, b"hopper.."), (ptx, HOPPER, b"portable"))
    other = fatbin((ELF, 100, b"blackwell"), (ELF, HOPPER, b"as well"))
    whole = library(one + bytes(8) + other)
    found = [(each.kind, each.architecture) for each in payloads(whole)]
    assert found == [(ELF, 80), (ELF, 90), (ptx, 90), (ELF, 100), (ELF, 90)]
    kept = keep_hopper(whole)
    assert len(kept) == len(whole)
    assert kept == whole.replace(b"ampere..", bytes(8)).replace(b"portable", bytes(8)).replace(
        b"blackwell", bytes(9)
    )


def test_a_library_without_gpu_code_is_refused() -> None:
    with pytest.raises(FatbinError, match="no section"):
        keep_hopper(library(b"text", b".text"))


def test_libraries_bring_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (interpreter,) = {Path(sys.executable).resolve()}
    dynamic = subprocess.run(
        ["readelf", "--dynamic", interpreter], capture_output=True, text=True, check=True
    ).stdout
    name = re.findall(r"NEEDED.*\[(lib.*)\]", dynamic)[0]
    brought = tmp_path / "below" / name
    shutil.copy(interpreter, brought)
    shutil.copy(interpreter, tmp_path / "unrelated.so")
    start = tmp_path / "start.so"
    shutil.copy(interpreter, start)
    assert needed(tmp_path, [start]) == {start, brought}

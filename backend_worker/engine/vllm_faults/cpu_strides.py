"""Give kernels of CPUs the strides that they ask for.

Both of these raise for tensors that PyTorch calls contiguous, or views without a copy. vLLM's
convolution of linear attention is given slices of a projection, which one token leaves with the
projection's stride, so that a prompt of one token ended one engine after the other. Its product of
matrices is given Llama 4's patches transposed, so that one small picture did.
"""

from typing import Any

import torch
from vllm import _custom_ops

_convolve = _custom_ops.causal_conv1d_fwd_cpu
_multiply = _custom_ops.onednn_mm


def causal_conv1d_fwd_cpu(x: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """See vLLM's; ``x`` has a column for each token."""
    rows, columns = x.shape
    if columns == 1:
        x = x.contiguous().as_strided((rows, 1), (1, rows))
    return _convolve(x, *arguments, **named)


def onednn_mm(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See vLLM's."""
    return _multiply(handler, x if x.stride(-1) == 1 else x.contiguous(), bias)


vars(_custom_ops)["causal_conv1d_fwd_cpu"] = causal_conv1d_fwd_cpu
vars(_custom_ops)["onednn_mm"] = onednn_mm

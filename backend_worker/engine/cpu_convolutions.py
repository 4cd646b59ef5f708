"""Let engines on CPUs with linear attention read a single token of a prompt.

vLLM makes a slice of a projection contiguous and transposes it for its convolution. A slice with
one token is not copied, so the kernel refuses the projection's stride: a prompt of one token, or
one whose last token is all that a step reads, ended one engine after the other. An engine's
process imports this module with ``slow_structures``.
"""

from typing import Any

import torch
from vllm import _custom_ops

_convolve = _custom_ops.causal_conv1d_fwd_cpu


def causal_conv1d_fwd_cpu(x: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """See vLLM's; ``x`` has a column for each token."""
    rows, columns = x.shape
    if columns == 1:
        x = x.contiguous().as_strided((rows, 1), (1, rows))
    return _convolve(x, *arguments, **named)


vars(_custom_ops)["causal_conv1d_fwd_cpu"] = causal_conv1d_fwd_cpu

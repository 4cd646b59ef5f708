"""No stride of a tensor ends an engine on a CPU."""

import torch
from vllm import _custom_ops

from backend_worker.engine.vllm_faults import cpu_strides


def convolved(tokens: torch.Tensor) -> torch.Tensor:
    rows, read = tokens.shape
    return _custom_ops.causal_conv1d_fwd_cpu(
        x=tokens,
        weight=torch.arange(rows * 4, dtype=torch.bfloat16).view(rows, 4) / rows,
        bias=None,
        conv_states=torch.zeros(1, 3, rows, dtype=torch.bfloat16).transpose(1, 2),
        query_start_loc=torch.tensor([0, read], dtype=torch.int32),
        cache_indices=torch.zeros(1, dtype=torch.int32),
        has_initial_state=torch.zeros(1, dtype=torch.bool),
        silu_activation=True,
        is_weight_packed=False,
    )


def test_one_token_of_a_wider_projection_is_read() -> None:
    assert _custom_ops.causal_conv1d_fwd_cpu is cpu_strides.causal_conv1d_fwd_cpu
    projection = torch.randn(2, 192, dtype=torch.bfloat16)
    both = projection[:, :128].contiguous().T
    one = projection[:1, :128].contiguous().T  # still with the projection's stride
    assert torch.equal(convolved(one), convolved(both)[:, :1])


def test_transposed_numbers_are_multiplied() -> None:
    assert _custom_ops.onednn_mm is cpu_strides.onednn_mm
    weight, patches = torch.randn(128, 64), torch.randn(1, 64, 5).transpose(1, 2)
    handler = _custom_ops.create_onednn_mm(weight.t())
    assert torch.allclose(
        _custom_ops.onednn_mm(handler, patches, None), patches @ weight.t(), atol=1e-4
    )

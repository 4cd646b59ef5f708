"""Whether vLLM's compiled operators and FlashAttention 3 compute on this GPU what PyTorch does.

    python -m tests.gpu.kernels

Prints one JSON line, a :class:`tests.gpu.results.Kernels`, with flags of vLLM that replace what is
wrong, so that one operator which does not fit the card spoils no other part of a run.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
from vllm import _custom_ops  # noqa: F401 # loads the operators
from vllm.vllm_flash_attn import flash_attn_varlen_func

from tests.gpu.results import Kernels

WITHOUT_FLASH: Final = (
    "--attention-backend=TRITON_ATTN",
    "--mm-encoder-attn-backend=TRITON_ATTN",
)
WITHOUT_OPERATORS: Final = (
    "--compilation-config=" + json.dumps({"custom_ops": ["none"]}),
    "--kernel-config="
    + json.dumps({"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}}),
)


def random_tensor(*shape: int) -> Any:
    """Reproducible, in bfloat16."""
    return torch.randn(*shape, generator=_GENERATOR, device="cuda").to(torch.bfloat16)


def relative_error(found: Any, expected: Any) -> float:
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm())


def empty(*shape: int) -> Any:
    """Not a number until an operator has written it."""
    return torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)


def rms_norm() -> float:
    x, weight, found = random_tensor(64, 128), random_tensor(128), empty(64, 128)
    torch.ops._C.rms_norm(found, x, weight, 1e-6)
    norm = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return relative_error(found, x.float() * norm * weight.float())


def silu_and_mul() -> float:
    x, found = random_tensor(64, 512), empty(64, 256)
    torch.ops._C.silu_and_mul(found, x)
    gate = torch.nn.functional.silu(x[:, :256].float())
    return relative_error(found, gate * x[:, 256:].float())


def gelu_quick() -> float:
    x, found = random_tensor(64, 256), empty(64, 256)
    torch.ops._C.gelu_quick(found, x)
    return relative_error(found, x.float() * torch.sigmoid(1.702 * x.float()))


def view_of_host_memory() -> float:
    host = torch.arange(4096, dtype=torch.int32).pin_memory()
    return float((torch.ops._C.get_cuda_view_from_cpu_tensor(host).cpu() != host).sum())


def reshape_and_cache_flash() -> float:
    keys, values = random_tensor(40, 2, 64), random_tensor(40, 2, 64)
    caches = [torch.zeros(8, 16, 2, 64, device="cuda", dtype=keys.dtype) for _ in range(2)]
    slots = torch.randperm(128, device="cuda", generator=_GENERATOR)[:40]
    one = torch.ones(1, device="cuda")
    torch.ops._C_cache_ops.reshape_and_cache_flash(keys, values, *caches, slots, "auto", one, one)
    found = torch.stack([cache.flatten(0, 1)[slots] for cache in caches])
    return relative_error(found, torch.stack([keys, values]))


def flash_varlen() -> float:
    q, k, v = (random_tensor(300, 2, 64) for _ in range(3))
    starts = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    found = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=200, max_seqlen_k=200,
        causal=False, fa_version=3,
    )  # fmt: skip
    parts = (slice(0, 100), slice(100, 300))
    expected = [_attention(q[part], k[part], v[part], None) for part in parts]
    return relative_error(found, torch.cat(expected))


def flash_paged() -> float:
    keys, values = random_tensor(32, 16, 2, 64), random_tensor(32, 16, 2, 64)
    table = torch.randperm(32, device="cuda", generator=_GENERATOR)[:20].to(torch.int32).view(1, 20)
    used, q = 300, random_tensor(53, 2, 64)
    found = flash_attn_varlen_func(
        q, keys, values, cu_seqlens_q=torch.tensor([0, 53], device="cuda", dtype=torch.int32),
        max_seqlen_q=53, max_seqlen_k=used, causal=True, block_table=table, fa_version=3,
        seqused_k=torch.tensor([used], device="cuda", dtype=torch.int32),
    )  # fmt: skip
    k, v = (cache[table[0].long()].flatten(0, 1)[:used] for cache in (keys, values))
    positions = torch.arange(53, device="cuda")[:, None] + used - 53
    mask = torch.arange(used, device="cuda")[None] <= positions
    return relative_error(found, _attention(q, k, v, mask))


def _attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    heads_first = (each.float().transpose(0, 1)[None] for each in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads_first, attn_mask=mask)[0].transpose(0, 1)


OPERATORS: Final[dict[Callable[[], float], float]] = {
    rms_norm: 0.01,
    silu_and_mul: 0.01,
    gelu_quick: 0.01,
    view_of_host_memory: 0.5,
}
FLASH: Final[dict[Callable[[], float], float]] = {
    reshape_and_cache_flash: 1e-6,
    flash_varlen: 0.02,
    flash_paged: 0.02,
}
"""The error that each may have."""


def check(operators: dict[Callable[[], float], float], errors: dict[str, float | str]) -> bool:
    """Run operators, and note the error of each. False if one is wrong."""
    right = True
    for operator, limit in operators.items():
        name = operator.__name__
        try:
            error = operator()
            torch.cuda.synchronize()
        except (RuntimeError, AttributeError, NotImplementedError) as failure:
            errors[name], right = f"{type(failure).__name__}: {failure}"[:300], False
            continue
        errors[name] = round(error, 6) if error == error else "not a number"
        right = right and error < limit
    return right


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    errors: dict[str, float | str] = {}
    flags = [] if check(FLASH, errors) else [*WITHOUT_FLASH]
    flags += [] if check(OPERATORS, errors) else WITHOUT_OPERATORS
    versions = {"python": platform.python_version(), "driver": driver()}
    found = Kernels(torch.cuda.get_device_name(0), versions, errors, flags)
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")


_GENERATOR: Final = torch.Generator("cuda").manual_seed(0)

if __name__ == "__main__":
    main()

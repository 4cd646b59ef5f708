"""LoRA adapters for tiny models: small files that change every answer."""

import json
from pathlib import Path

RANK = 8
FLAGS = ("--enable-lora", f"--max-lora-rank={RANK}", "--max-loras=2")
"""Of workers and plain vLLM."""
ALLOWED = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""Where adapters come and go while it serves."""

TARGETS = ("q_proj", "v_proj")


def write_adapter(
    directory: Path,
    layers: str = "model.layers",
    seed: int = 1,
    *,
    rank: int = RANK,
    wider: int = 0,
    scale: float = 0.3,
) -> Path:
    """An adapter; the directory.

    Args:
        layers: what its model calls those of its decoder.
        seed: another one, other weights.
        rank: engines take up to ``RANK``.
        wider: by so much than the model.
        scale: of its weights.
    """
    import torch
    from safetensors.torch import save_file

    from tests.families.makers.base import HIDDEN, LAYERS

    generator = torch.Generator().manual_seed(seed)
    width = HIDDEN + wider
    tensors = {}
    for layer in range(LAYERS):
        for target in TARGETS:
            key = f"base_model.model.{layers}.{layer}.self_attn.{target}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * scale
            tensors[f"{key}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * scale
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
        "target_modules": TARGETS, "bias": "none", "lora_dropout": 0.0,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory

"""Random weights for any architecture that vLLM has, in the form in which vLLM keeps them.

The model is built by vLLM itself from its configuration, and written as ``--load-format
sharded_state`` reads it: so a maker needs a configuration and a processor, and no model class. As
in ``examples/demo_models/weights.py``, an answer is to follow everything in its prompt.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GAINS: Mapping[str, float] = {
    "vision": 1.5,
    "visual": 1.5,
    "vit.": 1.5,
    "audio": 1.5,
    "projector": 1.5,
    "connector": 1.5,
    "qkv_proj": 1.8,
    "q_proj": 1.9,
    "k_proj": 1.9,
    "v_proj": 1.7,
    "o_proj": 1.7,
    "lm_head": 4.0,
}
"""How many times the usual 1/sqrt(fan-in); the first name contained wins."""

REPETITION_AVERSION = 2.0
TIED = 0.02
"""An embedding that is the head as well must not say the last token again."""


def draw(directory: Path) -> None:
    """Write the weights of the model whose configuration lies in a directory, where others of this
    process may have been drawn before."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.utils.torch_utils import set_default_torch_dtype

    # vLLM looks at a class that it meets for the first time in a process of its own, for 16 s, and
    # keeps what it saw in its cache. This process is there for the class anyway.
    registry._run_in_subprocess = lambda look: look()
    settings = EngineArgs(
        model=str(directory),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        load_format="dummy",
        trust_remote_code="auto_map" in (directory / "config.json").read_text(),
    ).create_engine_config()
    with set_current_vllm_config(settings):
        _one_process()
        with set_default_torch_dtype(settings.model_config.dtype), torch.device("cpu"):
            model = initialize_model(settings)
        _fill(model, settings.model_config.get_vocab_size())
        ShardedStateLoader.save_model(model, str(directory))


def _one_process() -> None:
    """What vLLM's layers ask for their share of."""
    import tempfile

    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    with tempfile.NamedTemporaryFile(prefix="mmrouter-family-", delete=False) as meeting:
        path = Path(meeting.name)
    path.unlink()
    parallel_state.init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
    parallel_state.ensure_model_parallel_initialized(1, 1)


def _fill(model: Any, vocabulary: int) -> None:
    import torch

    embedding = head = None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _draw_one(name, weight, vocabulary)
            if _embeds_tokens(name, weight, vocabulary):
                embedding = weight if embedding is None else embedding
            if "lm_head" in name and weight.ndim == 2:
                head = weight
        if embedding is None:
            return
        if head is None or head.shape != embedding.shape:
            embedding *= TIED
        else:
            head -= REPETITION_AVERSION * embedding.shape[1] ** -0.5 * embedding


def _embeds_tokens(name: str, weight: Any, vocabulary: int) -> bool:
    named = any(
        part in name for part in ("embed_tokens", "word_embeddings", "tok_embeddings", ".wte.")
    )
    return named and weight.ndim == 2 and weight.shape[0] >= vocabulary


def _draw_one(name: str, weight: Any, vocabulary: int) -> None:
    import torch

    if not weight.is_floating_point():
        weight.zero_()
        return
    # One generator for each weight, so that none depends on the order of the others.
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    if name.endswith(".A"):  # of Mamba, which decays
        weight.uniform_(-1.0, -0.1, generator=generator)
    elif "norm" in name or "ln_" in name or "layer_scale" in name or ".ls" in name:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    elif weight.ndim == 1 and name.endswith(".weight"):  # of a norm without a name
        weight.fill_(1.0)
    elif weight.ndim <= 1:
        weight.normal_(0.0, 0.02, generator=generator)
    elif _embeds_tokens(name, weight, vocabulary):
        weight.normal_(0.0, 1.0, generator=generator)
    else:
        gain = next((value for part, value in GAINS.items() if part in name), 1.0)
        weight.normal_(0.0, gain * weight[0].numel() ** -0.5, generator=generator)

"""Models without media: plain, windowed, hybrid, with experts, and drafts."""

from typing import Any

import transformers as hf

from tests.families.makers.base import EXPERTS, HIDDEN, Settings, Tiny, chat, decoder, vocabulary


def _text(config: Any, architecture: str, *, drawn: bool = True, **more: Any) -> Tiny:
    tokenizer = vocabulary(chat())
    settings = config(**decoder(tokenizer, **more), architectures=[architecture])
    return Tiny(settings, tokenizer, drawn=drawn)


def llama() -> Tiny:
    return _text(hf.LlamaConfig, "LlamaForCausalLM")


def eagle() -> Tiny:
    """A draft model of one layer for ``llama``."""
    return _text(hf.LlamaConfig, "LlamaForCausalLM", num_hidden_layers=1, drawn=False)


def mistral_window() -> Tiny:
    """Every layer with a window: one group of the KV cache, which is no full attention."""
    return _text(hf.MistralConfig, "MistralForCausalLM", sliding_window=64)


def gemma2() -> Tiny:
    """Layers with a window and layers without, in turn."""
    more: Settings = {"num_hidden_layers": 4, "sliding_window": 64, "query_pre_attn_scalar": 64}
    return _text(hf.Gemma2Config, "Gemma2ForCausalLM", tie_word_embeddings=True, **more)


def mixtral() -> Tiny:
    more: Settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return _text(hf.MixtralConfig, "MixtralForCausalLM", **more)


def granite_hybrid() -> Tiny:
    """Mamba-2 layers beside attention."""
    return _text(
        hf.GraniteMoeHybridConfig, "GraniteMoeHybridForCausalLM",
        num_hidden_layers=4, layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=4, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=32, mamba_expand=2,
        mamba_chunk_size=64, shared_intermediate_size=256, num_local_experts=0,
        num_experts_per_tok=0, position_embedding_type="rope", bos_token_id=None,
    )  # fmt: skip


def qwen3_next() -> Tiny:
    """Gated delta nets beside attention."""
    return _text(
        hf.Qwen3NextConfig, "Qwen3NextForCausalLM",
        num_hidden_layers=4, linear_num_value_heads=2, linear_num_key_heads=2,
        linear_key_head_dim=64, linear_value_head_dim=64, shared_expert_intermediate_size=HIDDEN,
        **EXPERTS,
    )  # fmt: skip


def glm4_moe() -> Tiny:
    """Experts, and a layer that predicts the token after the next."""
    more: Settings = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    more |= {"moe_intermediate_size": HIDDEN, "use_qk_norm": False}
    return _text(hf.Glm4MoeConfig, "Glm4MoeForCausalLM", num_nextn_predict_layers=1, **more)

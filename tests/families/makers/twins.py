"""Models that are Qwen's but for their configuration or their experts."""

import transformers as hf

from tests.families.makers.base import Tiny
from tests.families.makers.qwens import media_ids, qwen3_5_moe, qwen3_vl, qwen3_vl_moe


def cosmos3() -> Tiny:
    """Cosmos 3: Qwen3-VL; its tower that generates stays out of vLLM."""
    tiny = qwen3_vl()
    config = hf.Cosmos3OmniConfig(
        text_config=tiny.config.text_config,
        vision_config=tiny.config.vision_config,
        architectures=["Cosmos3ForConditionalGeneration"],
        **media_ids(tiny.tokenizer),
    )
    return Tiny(config, tiny.tokenizer, tiny.processor)


def intern_s2_mobius() -> Tiny:
    """Intern-S2 Mobius: layers take turns with two banks of experts, beside one of their own."""
    tiny = qwen3_5_moe()
    tiny.config.text_config.num_blocks = 2
    tiny.config.text_config.layer_scale = True
    name = "InternS2MobiusForConditionalGeneration"
    return Tiny(tiny.config, tiny.tokenizer, tiny.processor, architecture=name)


def intern_s1_pro() -> Tiny:
    """Intern-S1 Pro: Qwen3-VL with experts, and learnt sums of frequencies for positions."""
    tiny = qwen3_vl_moe()
    tiny.config.text_config.rope_parameters = {
        "rope_type": "default", "rope_theta": 1e6,
        "fope_init_factor": 0.1, "fope_sep_head": True, "num_inv_freq": None,
    }  # fmt: skip
    name = "InternS1ProForConditionalGeneration"
    return Tiny(tiny.config, tiny.tokenizer, tiny.processor, architecture=name)

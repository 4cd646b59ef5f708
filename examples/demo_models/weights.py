"""Random weights under which a model's answer follows everything in its prompt."""

import hashlib
from collections.abc import Mapping

from demo_models.text import never_worth_saying

HIDDEN = 128
HEADS = 2  # of 64: vLLM's attention on CPU does not take 16
LAYERS = 3

# How many times the usual 1/sqrt(fan-in) a weight is drawn at; the first name contained wins.
# A family names its encoders' gains in front of these.
# Attention reaches far back with some contrast (q, k), and what it brings outweighs the last
# token's own embedding (v, o), so the answer follows the whole prompt. The best token then wins by
# about one (lm_head), which is far above what rounding or another order of summation changes.
GAINS = {
    "q_proj": 1.9,
    "k_proj": 1.9,
    "v_proj": 1.7,
    "o_proj": 1.7,
    "lm_head": 4.0,
}
# How strongly lm_head turns against the last token's embedding; without it greedy answers end in
# one token repeated for ever, in which a wrong image would go unnoticed.
REPETITION_AVERSION = 2.0


def draw(model, tokenizer, embedding, lm_head, encoder_gains: Mapping[str, float]) -> None:
    """Draw all weights of a model, each from a generator of its own.

    Args:
        embedding, lm_head: of its language model.
        encoder_gains: gains of the encoders' weights, by a part of their names.
    """
    import torch

    gains = {**encoder_gains, **GAINS}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # One generator for each weight, so that none depends on the order of the others.
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
            generator = torch.Generator().manual_seed(seed)
            if "norm" in name or "ln_q" in name or "ln_post" in name:
                weight.fill_(1.0 if name.endswith("weight") else 0.0)
            elif weight.ndim == 1:
                weight.normal_(0.0, 0.02, generator=generator)
            elif "embed_tokens" in name:
                weight.normal_(0.0, 1.0, generator=generator)
            else:
                gain = next((value for key, value in gains.items() if key in name), 1.0)
                fan_in = weight[0].numel()
                weight.normal_(0.0, gain * fan_in**-0.5, generator=generator)
        lm_head -= REPETITION_AVERSION * HIDDEN**-0.5 * embedding
        lm_head[never_worth_saying(tokenizer)] *= 0.01

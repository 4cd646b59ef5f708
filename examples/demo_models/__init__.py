"""Tiny models of several families; each file makes one, and names what is special in it."""

FAMILIES = {
    "qwen2-vl": "demo_models.qwen2_vl",
    "qwen2.5-omni": "demo_models.qwen2_5_omni",
    "idefics3": "demo_models.idefics3",
}
"""Module of each family, whose ``write(directory)`` makes the model."""

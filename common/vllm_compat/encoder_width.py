"""How wide the embeddings are that an encoder makes of a medium."""

from vllm.config import ModelConfig


def embeds_width(config: ModelConfig, modality: str) -> int:
    """How wide a medium's embeddings are: as the model's own, and for pictures and films of Qwen 3
    once more for each layer that their encoder's features go to.
    """
    width = config.get_inputs_embeds_size()
    if modality not in ("image", "video"):
        return width
    model = getattr(config.hf_config, "thinker_config", config.hf_config)
    layers = getattr(getattr(model, "vision_config", None), "deepstack_visual_indexes", None)
    return width * (1 + len(layers or ()))

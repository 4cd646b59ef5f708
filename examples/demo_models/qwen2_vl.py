"""Qwen2-VL: images and videos, each one row of placeholder tokens."""

from pathlib import Path

from demo_models.text import chat_template, make_tokenizer, text_config, token_ids
from demo_models.weights import HEADS, HIDDEN, LAYERS, draw

VISION_LAYERS = 2
PATCH, MERGE = 14, 2
MEDIA_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = chat_template(
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
)


def write(directory: Path) -> None:
    from transformers import Qwen2VLForConditionalGeneration

    tokenizer = make_tokenizer(MEDIA_TOKENS, TEMPLATE)
    model = Qwen2VLForConditionalGeneration(make_config(tokenizer))
    embedding = model.model.language_model.embed_tokens.weight
    draw(model, tokenizer, embedding, model.lm_head.weight, {"visual": 1.5})
    model.save_pretrained(directory)
    make_processor(tokenizer).save_pretrained(directory)


def make_processor(tokenizer):
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    unit = PATCH * MERGE
    # 1024x1024 is rounded up to 37 units a side; smaller than 2 units a side is enlarged.
    size = {"shortest_edge": (2 * unit) ** 2, "longest_edge": (37 * unit) ** 2}
    geometry = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "size": size}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**geometry),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**geometry),
        chat_template=TEMPLATE,
    )


def make_config(tokenizer):
    from transformers import Qwen2VLConfig

    image, video, start, end = token_ids(
        tokenizer, "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
    )
    return Qwen2VLConfig(
        architectures=["Qwen2VLForConditionalGeneration"],
        text_config=text_config(tokenizer)
        | {
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [8, 12, 12],
            },
        },
        vision_config={
            "depth": VISION_LAYERS,
            "embed_dim": HIDDEN,
            "hidden_size": HIDDEN,
            "num_heads": HEADS,
            "mlp_ratio": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
    )

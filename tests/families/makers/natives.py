"""Models whose processor is vLLM's own, for any number of patches."""

from typing import Any

import transformers as hf

from tests.families.makers.base import (
    HIDDEN,
    LAYERS,
    MROPE,
    Settings,
    Tiny,
    chat,
    decoder,
    ids,
    vision,
    vocabulary,
)
from tests.families.makers.qwens import INTERLEAVED, TEMPLATE, VISION_TOKENS, geometry, media_ids

WINDOW = 64


def isaac() -> Tiny:
    """Isaac: SigLIP 2, four patches to a token, M-RoPE of its own proportions."""
    template = chat("<image>")
    tokenizer = vocabulary(template, "<image>", "<|image_pad|>")
    text = decoder(tokenizer, rope_parameters=MROPE | {"mrope_section": [16, 8, 8]})
    eye = vision(patch_size=16, num_patches=256, num_channels=3, pixel_shuffle_scale_factor=2)
    del eye["image_size"]
    config = text | {
        "architectures": ["IsaacForConditionalGeneration"],
        "model_type": "isaac",
        "dtype": "float32",
        "text_config": text | {"model_type": "qwen3"},
        "vision_config": eye,
        "vision_token": "<image>",
        # What its processor takes by itself.
        "vision_patch_size": 16,
        "vision_min_num_patches": 256,
        "vision_max_num_patches": 6144,
        "pixel_shuffle_scale": 2,
    }
    return Tiny(config, tokenizer)


def muse_glimmer() -> Tiny:
    """Muse Glimmer: blocks of patches that see only themselves, and the time in words."""
    names = ("<|patch|>", "<|video|>")
    around = (
        "<|image|>", "<|image_start|>", "<|image_end|>", "<|vid_start|>", "<|vid_end|>",
        "<|vid_frame_separator|>",
    )  # fmt: skip
    template = chat(*names)
    tokenizer = vocabulary(template, *names, *around)
    image, video = ids(tokenizer, *names)
    text = decoder(
        tokenizer,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        output_multiplier=1.0,
    )
    eye = vision(pos_emb_height=8, pos_emb_width=8, output_dim=4 * HIDDEN, adapter_dim=HIDDEN)
    del eye["image_size"]
    config = {
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        "model_type": "muse_glimmer",
        "dtype": "float32",
        "text_config": text | {"model_type": "muse_glimmer_text"},
        "vision_config": eye | {"model_type": "muse_glimmer_vision"},
        # What vLLM 0.33 reads in place of the two widths above.
        "out_hidden_size": 4 * HIDDEN,
        "projector_hidden_size": HIDDEN,
        "image_token_id": image,
        "video_token_id": video,
    }
    processor = hf.MuseGlimmerProcessor(
        hf.MuseGlimmerImageProcessor(), hf.MuseGlimmerVideoProcessor(), tokenizer, template
    )
    return Tiny(config, tokenizer, processor)


def cosmos3_edge() -> Tiny:
    """Cosmos 3 Edge: SigLIP 2, each frame by itself, over Nemotron-H without Mamba."""
    tokenizer = vocabulary(TEMPLATE, *VISION_TOKENS)
    text = decoder(tokenizer, "cosmos3_edge_text", rope_parameters=INTERLEAVED)
    eye = vision("cosmos3_edge_vision", patch_size=16, num_patches=256, num_channels=3)
    del eye["image_size"]
    projector: dict[str, Any] = {
        "input_hidden_size": HIDDEN, "out_hidden_size": HIDDEN, "spatial_merge_size": 2,
        "merger_intermediate_size": 2 * HIDDEN,
    }  # fmt: skip
    config = {
        "architectures": ["Cosmos3EdgeForConditionalGeneration"],
        "model_type": "cosmos3_edge",
        "dtype": "float32",
        "text_config": text | {"num_hidden_layers": LAYERS},
        "vision_config": eye,
        "projector_config": projector,
        "projector_hidden_size": 2 * HIDDEN,  # what vLLM 0.33 reads in its place
        **media_ids(tokenizer),
    }
    sizes: Settings = geometry(16) | {"temporal_patch_size": 1}
    processor = hf.Cosmos3EdgeProcessor(
        hf.Cosmos3EdgeImageProcessor(**sizes),
        tokenizer,
        hf.Cosmos3EdgeVideoProcessor(**sizes),
        chat_template=TEMPLATE,
    )
    return Tiny(config, tokenizer, processor)

"""Images cut into tiles, with words or marks between them."""

import transformers as hf

from tests.families.makers.base import (
    HIDDEN,
    PATCH,
    SIDE,
    Tiny,
    chat,
    decoder,
    ids,
    square,
    vision,
    vocabulary,
)

SCALE = 2
TOKENS_PER_TILE = (SIDE // PATCH // SCALE) ** 2
GRID = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
AROUND = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *GRID)


def idefics3() -> Tiny:
    """Idefics3: text between the placeholders of an image's tiles."""
    template = chat("<image>")
    tokenizer = vocabulary(template, "<image>", *AROUND)
    config = hf.Idefics3Config(
        text_config=decoder(tokenizer, "llama"),
        vision_config=vision(),
        scale_factor=SCALE,
        image_token_id=ids(tokenizer, "<image>")[0],
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Idefics3ForConditionalGeneration"],
    )
    sizes = {"size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    processor = hf.Idefics3Processor(
        hf.Idefics3ImageProcessor(**sizes),
        tokenizer,
        image_seq_len=TOKENS_PER_TILE,
        chat_template=template,
    )
    return Tiny(config, tokenizer, processor)


def internvl_hf() -> Tiny:
    """InternVL as Hugging Face has it: tiles, and videos frame by frame."""
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    template = chat("<IMG_CONTEXT>", "<video>")
    tokenizer = vocabulary(template, **names)
    config = hf.InternVLConfig(
        text_config=decoder(tokenizer, "qwen2"),
        vision_config=vision(),
        image_token_id=ids(tokenizer, "<IMG_CONTEXT>")[0],
        image_seq_length=TOKENS_PER_TILE,
        architectures=["InternVLForConditionalGeneration"],
    )
    processor = hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=square(), crop_to_patches=True, max_patches=4),
        tokenizer,
        hf.InternVLVideoProcessor(size=square()),
        image_seq_length=TOKENS_PER_TILE,
        chat_template=template,
    )
    return Tiny(config, tokenizer, processor)


def lfm2_vl() -> Tiny:
    """LFM2-VL: tiles of several sizes, and short convolutions with a state beside attention."""
    patch, tile = 16, 64
    names = {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail": "<|img_thumbnail|>",
    }
    grid = (f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11))
    template = chat("<image>")
    tokenizer = vocabulary(template, *grid, **names)
    config = hf.Lfm2VlConfig(
        text_config=decoder(
            tokenizer, "lfm2", num_hidden_layers=4,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
            # What published configurations have besides, and vLLM reads.
            conv_dim=HIDDEN, conv_dim_out=HIDDEN, conv_L_cache=3, block_dim=HIDDEN,
            block_ff_dim=2 * HIDDEN, block_norm_eps=1e-5, tie_word_embeddings=True,
        ),
        vision_config=vision(
            "siglip2_vision_model", patch_size=patch, num_patches=64, vision_use_head=False
        ),
        image_token_id=ids(tokenizer, "<image>")[0],
        projector_hidden_size=HIDDEN,
        architectures=["Lfm2VlForConditionalGeneration"],
    )  # fmt: skip
    pictures = hf.Lfm2VlImageProcessor(
        tile_size=tile, size=square(tile), encoder_patch_size=patch, min_image_tokens=4,
        max_image_tokens=16, max_tiles=4,
    )  # fmt: skip
    processor = hf.Lfm2VlProcessor(pictures, tokenizer, chat_template=template)
    return Tiny(config, tokenizer, processor)


def llama4() -> Tiny:
    """Llama 4: tiles, experts, and layers whose attention stays within chunks."""
    media = (
        "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>",
        "<|tile_x_separator|>", "<|tile_y_separator|>",
    )  # fmt: skip
    template = chat("<|image|>")
    tokenizer = vocabulary(template, *media)
    patch, start, end = ids(tokenizer, "<|patch|>", "<|image_start|>", "<|image_end|>")
    config = hf.Llama4Config(
        text_config=decoder(
            tokenizer, intermediate_size_mlp=2 * HIDDEN, num_hidden_layers=4, num_local_experts=4,
            attention_chunk_size=128, no_rope_layers=[1, 1, 1, 0],
        ),
        vision_config=vision(
            vision_output_dim=HIDDEN, projector_input_dim=HIDDEN, projector_output_dim=HIDDEN,
            intermediate_size=HIDDEN * 4,
        ),
        boi_token_index=start, eoi_token_index=end, image_token_index=patch,
        architectures=["Llama4ForConditionalGeneration"],
    )  # fmt: skip
    processor = hf.Llama4Processor(
        hf.Llama4ImageProcessor(size=square(), max_patches=4),
        tokenizer,
        patch_size=PATCH,
        pixel_shuffle_ratio=0.5,
        chat_template=template,
    )
    return Tiny(config, tokenizer, processor)

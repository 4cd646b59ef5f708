"""Models that see, each with a way of its own."""

import transformers as hf

from tests.families.makers.base import (
    HEADS,
    HIDDEN,
    MROPE,
    PATCH,
    SIDE,
    VISION_LAYERS,
    Settings,
    Tiny,
    chat,
    decoder,
    ids,
    square,
    tower,
    vision,
    vocabulary,
)
from tests.families.makers.llavas import PINPOINTS
from tests.families.makers.qwens import TEMPLATE, media_ids, qwen2_vl_parts

TILED = {"size": square(), "crop_to_patches": True, "max_patches": 4}


def aria() -> Tiny:
    """Aria: queries as many for every image, experts with grouped weights."""
    template = chat("<|img|>")
    tokenizer = vocabulary(template, image_token="<|img|>")
    side, patch, queries = 980, 70, 16  # the one side that the processor takes by itself
    config = hf.AriaConfig(
        text_config=decoder(
            tokenizer, "aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=2
        ),
        vision_config=vision("idefics3_vision", image_size=side, patch_size=patch),
        projector_patch_to_query_dict={str((side // patch) ** 2): queries},
        image_token_index=ids(tokenizer, "<|img|>")[0],
        architectures=["AriaForConditionalGeneration"],
    )
    pictures = hf.AriaImageProcessor(max_image_size=side)
    processor = hf.AriaProcessor(
        pictures, tokenizer, chat_template=template, size_conversion={side: queries}
    )
    return Tiny(config, tokenizer, processor)


def blip2() -> Tiny:
    """BLIP-2: the answers of a Q-Former before all text, where nothing stands for them."""
    template = chat()
    tokenizer = vocabulary(template, image_token="<image>")
    text = decoder(tokenizer, "opt") | {
        "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, "do_layer_norm_before": True,
    }  # fmt: skip
    eye = vision(qkv_bias=True)
    asking = vision(encoder_hidden_size=HIDDEN, cross_attention_frequency=1, vocab_size=32)
    config = hf.Blip2Config(
        vision_config=eye,
        qformer_config=asking,
        text_config=text,
        num_query_tokens=16,
        image_token_index=ids(tokenizer, "<image>")[0],
        architectures=["Blip2ForConditionalGeneration"],
    )
    pictures = hf.BlipImageProcessor(size=square())
    return Tiny(config, tokenizer, hf.Blip2Processor(pictures, tokenizer, num_query_tokens=16))


def cohere2_vision() -> Tiny:
    """Command A Vision: tiles, each ended by a break."""
    names = {
        "image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>", "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }  # fmt: skip
    template = chat("<|IMG_PATCH|>")
    tokenizer = vocabulary(template, **names)
    patch = 14
    config = hf.Cohere2VisionConfig(
        text_config=decoder(tokenizer, "cohere2", layer_types=["sliding_attention"] * 2
                            + ["full_attention"], sliding_window=64, tie_word_embeddings=True),
        vision_config=vision("siglip_vision_model", patch_size=patch, vision_use_head=False),
        downsample_factor=2,
        image_token_id=ids(tokenizer, "<|IMG_PATCH|>")[0],
        alignment_intermediate_size=2 * HIDDEN,
        architectures=["Cohere2VisionForConditionalGeneration"],
    )  # fmt: skip
    # A tile has as many tokens as the square of what the processor calls a patch.
    pictures = hf.Cohere2VisionImageProcessor(patch_size=SIDE // patch // 2, **TILED)
    return Tiny(config, tokenizer, hf.Cohere2VisionProcessor(pictures, tokenizer, template))


def exaone4_5() -> Tiny:
    """EXAONE 4.5: Qwen2.5-VL's encoder with grouped heads."""
    tokenizer, _ = qwen2_vl_parts(hf.Qwen2VLProcessor)
    _, parts = qwen2_vl_parts(hf.Qwen2_5_VLProcessor)
    processor = hf.Exaone4_5_Processor(
        parts.image_processor, tokenizer, parts.video_processor, chat_template=TEMPLATE
    )
    windows: Settings = {"window_size": 4 * 28, "fullatt_block_indexes": [VISION_LAYERS - 1]}
    config = hf.Exaone4_5_Config(
        text_config=decoder(tokenizer, "exaone4", sliding_window=None,
                            layer_types=["full_attention"] * 3),
        vision_config=tower(num_key_value_heads=HEADS, **windows),
        architectures=["Exaone4_5_ForConditionalGeneration"],
        **media_ids(tokenizer),
    )  # fmt: skip
    return Tiny(config, tokenizer, processor)


def granite4_vision() -> Tiny:
    """Granite 4 Vision: LLaVA-NeXT's tiles, put into several layers."""
    template = chat("<image>")
    tokenizer = vocabulary(template, "<image>")
    asking = vision("blip_2_qformer", encoder_hidden_size=HIDDEN, cross_attention_frequency=1)
    config = hf.Granite4VisionConfig(
        text_config=decoder(tokenizer, "granite"),
        vision_config=vision("siglip_vision_model", vision_use_head=False),
        qformer_config=asking,
        image_token_index=ids(tokenizer, "<image>")[0],
        image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="full",
        downsample_rate="1/2",
        deepstack_layer_map=[[-1, 0], [-2, 1]],
        spatial_target_layers=[2],
        architectures=["Granite4VisionForConditionalGeneration"],
    )
    processor = hf.Granite4VisionProcessor(
        hf.LlavaNextImageProcessor(
            size=square(), crop_size=square(), image_grid_pinpoints=PINPOINTS
        ),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        downsample_rate="1/2",
        chat_template=template,
    )
    return Tiny(config, tokenizer, processor)


def paddle_ocr_vl() -> Tiny:
    """PaddleOCR-VL: any number of patches under ERNIE's language model."""
    template = chat("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")
    names = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
    more = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>")
    tokenizer = vocabulary(template, *more, **names)
    image, start, end, video = ids(tokenizer, *names.values(), *more)
    config = hf.PaddleOCRVLConfig(
        text_config=decoder(tokenizer, rope_parameters=MROPE),
        vision_config=vision(spatial_merge_size=2),
        image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end,
        architectures=["PaddleOCRVLForConditionalGeneration"],
    )  # fmt: skip
    size = {"shortest_edge": 56**2, "longest_edge": 560**2}
    pictures = hf.PaddleOCRVLImageProcessor(size=size)
    return Tiny(config, tokenizer, hf.PaddleOCRVLProcessor(pictures, tokenizer, template))

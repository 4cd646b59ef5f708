"""LLaVA and its kin: a fixed number of tokens, tiles, pooled frames, rows with break tokens."""

from typing import Any

import transformers as hf

from tests.families.makers.base import (
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

PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [SIDE, 3 * SIDE]]
CROPPED = {"size": {"shortest_edge": SIDE}, "crop_size": square()}
COUNTED = {
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}


def llava() -> Tiny:
    """LLaVA-1.5: as many tokens for every image."""
    return _llava()


def llava_with_room() -> Tiny:
    """The same with the token that vLLM puts where embeddings stand among media."""
    return _llava("<prompt_embeds>")


def _llava(*special: str) -> Tiny:
    template = chat("<image>")
    tokenizer = vocabulary(template, "<image>", *special)
    config = hf.LlavaConfig(
        vision_config=vision(projection_dim=64),
        text_config=decoder(tokenizer, "llama"),
        image_token_index=ids(tokenizer, "<image>")[0],
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-1,
        architectures=["LlavaForConditionalGeneration"],
    )
    pictures = hf.CLIPImageProcessor(**CROPPED)
    processor = hf.LlavaProcessor(pictures, tokenizer, chat_template=template, **COUNTED)
    return Tiny(config, tokenizer, processor)


def llava_next() -> Tiny:
    """LLaVA-NeXT: tiles by aspect ratio, unpadded, with line breaks."""
    template = chat("<image>")
    tokenizer = vocabulary(template, "<image>")
    config = hf.LlavaNextConfig(
        vision_config=vision("clip_vision_model", projection_dim=64),
        text_config=decoder(tokenizer, "llama"),
        image_token_index=ids(tokenizer, "<image>")[0],
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        architectures=["LlavaNextForConditionalGeneration"],
    )
    pictures = hf.LlavaNextImageProcessor(image_grid_pinpoints=PINPOINTS, **CROPPED)
    processor = hf.LlavaNextProcessor(pictures, tokenizer, chat_template=template, **COUNTED)
    return Tiny(config, tokenizer, processor)


def llava_next_video() -> Tiny:
    """LLaVA-NeXT-Video: frames, pooled; in vLLM no images."""
    side = 2 * SIDE  # vLLM divides by sides over squared patches
    cropped = {"size": {"shortest_edge": side}, "crop_size": square(side)}
    template = chat("<image>", "<video>")
    tokenizer = vocabulary(template, "<image>", "<video>")
    image, video = ids(tokenizer, "<image>", "<video>")
    config = hf.LlavaNextVideoConfig(
        vision_config=vision("clip_vision_model", projection_dim=64, image_size=side),
        text_config=decoder(tokenizer, "llama"),
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        architectures=["LlavaNextVideoForConditionalGeneration"],
    )
    processor = hf.LlavaNextVideoProcessor(
        hf.LlavaNextVideoVideoProcessor(**cropped),
        hf.LlavaNextImageProcessor(image_grid_pinpoints=PINPOINTS, **cropped),
        tokenizer,
        chat_template=template,
        **COUNTED,
    )
    return Tiny(config, tokenizer, processor)


def llava_onevision() -> Tiny:
    """LLaVA-OneVision: tiles of images, pooled frames of videos."""
    template = chat("<image>", "<video>")
    tokenizer = vocabulary(template, "<image>", "<video>")
    image, video = ids(tokenizer, "<image>", "<video>")
    config = hf.LlavaOnevisionConfig(
        vision_config=vision("siglip_vision_model", vision_use_head=False),
        text_config=decoder(tokenizer, "qwen2"),
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=PINPOINTS,
        architectures=["LlavaOnevisionForConditionalGeneration"],
    )
    processor = hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=square(), image_grid_pinpoints=PINPOINTS),
        tokenizer,
        hf.LlavaOnevisionVideoProcessor(size=square()),
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=template,
    )
    return Tiny(config, tokenizer, processor)


def _pixtral_parts(merge: int) -> tuple[Any, Any, dict[str, Any]]:
    template = chat("[IMG]")
    tokenizer = vocabulary(template, "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    pictures = hf.PixtralImageProcessor(
        size={"longest_edge": 16 * PATCH}, patch_size=square(PATCH * merge)
    )
    processor = hf.PixtralProcessor(
        pictures, tokenizer, patch_size=PATCH, spatial_merge_size=merge, chat_template=template
    )
    return tokenizer, processor, vision("pixtral", image_size=16 * PATCH, head_dim=64)


def pixtral_hf() -> Tiny:
    """Pixtral as Hugging Face has it: a token at the end of each row of patches."""
    tokenizer, processor, tower = _pixtral_parts(1)
    config = hf.LlavaConfig(
        vision_config=tower,
        text_config=decoder(tokenizer, "mistral", sliding_window=None),
        image_token_index=ids(tokenizer, "[IMG]")[0],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        architectures=["LlavaForConditionalGeneration"],
    )
    return Tiny(config, tokenizer, processor)


def mistral3() -> Tiny:
    """Mistral 3: Pixtral's encoder, patches merged by two."""
    tokenizer, processor, tower = _pixtral_parts(2)
    config = hf.Mistral3Config(
        vision_config=tower,
        text_config=decoder(tokenizer, "mistral", sliding_window=None),
        image_token_index=ids(tokenizer, "[IMG]")[0],
        spatial_merge_size=2,
        vision_feature_layer=-1,
        architectures=["Mistral3ForConditionalGeneration"],
    )
    return Tiny(config, tokenizer, processor)


def light_on_ocr() -> Tiny:
    """LightOnOCR: Mistral 3's parts around Qwen3, and no break tokens."""
    tokenizer, processor, tower = _pixtral_parts(2)
    config = hf.Mistral3Config(
        vision_config=tower,
        text_config=decoder(tokenizer, "qwen3"),
        image_token_index=ids(tokenizer, "[IMG]")[0],
        spatial_merge_size=2,
        vision_feature_layer=-1,
        architectures=["LightOnOCRForConditionalGeneration"],
    )
    return Tiny(config, tokenizer, processor)

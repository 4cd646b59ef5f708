"""Gemma's kin: attention in both directions within an image, layers with a sliding window."""

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

WINDOW = 64


def gemma3() -> Tiny:
    """Gemma 3: layers with a window beside layers without, so two groups in the KV cache."""
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    template = chat("<start_of_image>")
    tokenizer = vocabulary(template, **names)
    tokenizer.add_tokens(["\n" * lines for lines in range(1, 5)])  # vLLM looks for them
    boi, eoi, image = ids(tokenizer, *names.values())
    config = hf.Gemma3Config(
        text_config=decoder(
            tokenizer,
            num_hidden_layers=4,
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            query_pre_attn_scalar=64,
            tie_word_embeddings=True,
        ),
        vision_config=vision(vision_use_head=False),
        mm_tokens_per_image=16,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_index=image,
        architectures=["Gemma3ForConditionalGeneration"],
    )
    processor = hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(size=square()),
        tokenizer,
        chat_template=template,
        image_seq_length=16,
    )
    return Tiny(config, tokenizer, processor)


def paligemma() -> Tiny:
    """PaliGemma: the image before all text, and attention in both directions over the prefix."""
    template = chat()
    tokenizer = vocabulary(template, image_token="<image>")
    tokenizer.add_tokens(["\n"])  # vLLM looks for it
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.add_bos_token = False  # PaliGemma 2's has none of its own
    pictures = hf.SiglipImageProcessor(size=square())
    pictures.image_seq_length = (SIDE // PATCH) ** 2
    processor = hf.PaliGemmaProcessor(pictures, tokenizer, chat_template=template)
    config = hf.PaliGemmaConfig(
        text_config=decoder(tokenizer, "gemma", tie_word_embeddings=True),
        vision_config=vision("siglip_vision_model", vision_use_head=False, projection_dim=128),
        image_token_index=ids(tokenizer, "<image>")[0],
        projection_dim=128,
        architectures=["PaliGemmaForConditionalGeneration"],
    )
    return Tiny(config, tokenizer, processor)

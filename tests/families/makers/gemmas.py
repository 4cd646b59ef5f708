"""Gemma's kin: attention in both directions within an image, layers with a sliding window."""

from typing import Any

import transformers as hf

from tests.families.makers.base import (
    HEAD,
    HEADS,
    HIDDEN,
    PATCH,
    SIDE,
    Settings,
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


def _gemma4(kind: str, eye: Settings, ear: Settings | None, **text: Any) -> Tiny:
    """
    Args:
        kind: how names of its classes begin.
        text: what its language model has besides.
    """
    names = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
        "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    }  # fmt: skip
    template = chat("<|image|>", "<|video|>", "<|audio|>")
    tokenizer = vocabulary(template, **names)
    image, boi, eoi, audio, boa, eoa, video = ids(tokenizer, *names.values())
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    config = getattr(hf, f"{kind}Config")(
        text_config=decoder(
            tokenizer, num_hidden_layers=4, sliding_window=WINDOW, tie_word_embeddings=True,
            layer_types=layers, global_head_dim=HEAD, num_global_key_value_heads=HEADS,
            vocab_size_per_layer_input=len(tokenizer), **text,
        ),
        vision_config=eye,
        audio_config=ear,
        boi_token_id=boi, eoi_token_id=eoi, image_token_id=image, video_token_id=video,
        boa_token_id=boa, eoa_token_index=eoa, audio_token_id=audio,
        architectures=[f"{kind}ForConditionalGeneration"],
    )  # fmt: skip
    processor = getattr(hf, f"{kind}Processor")(
        getattr(hf, f"{kind}AudioFeatureExtractor")(),
        getattr(hf, f"{kind}ImageProcessor")(max_soft_tokens=70),
        tokenizer,
        getattr(hf, f"{kind}VideoProcessor")(),
        chat_template=template,
        image_seq_length=70,
    )
    return Tiny(config, tokenizer, processor)


def gemma4() -> Tiny:
    """Gemma 4: soft tokens by an image's size, windows, embeddings of each layer."""
    eye = vision(
        num_key_value_heads=HEADS, head_dim=HEAD, patch_size=16, position_embedding_size=256,
        default_output_length=70,
    )  # fmt: skip
    return _gemma4("Gemma4", eye, None, hidden_size_per_layer_input=32)


def gemma4_unified() -> Tiny:
    """Gemma 4 without encoders: patches of pixels and frames of sound themselves."""
    eye: Settings = {"mm_embed_dim": HIDDEN, "output_proj_dims": HIDDEN, "num_soft_tokens": 70}
    return _gemma4("Gemma4Unified", eye, {"audio_embed_dim": 640})

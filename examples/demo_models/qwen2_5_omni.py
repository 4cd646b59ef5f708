"""Qwen2.5-Omni: images, videos and audio, and videos whose sound is interleaved with them.

Only the part that understands; vLLM serves no other.
"""

from pathlib import Path

from demo_models.text import chat_template, make_tokenizer, text_config, token_ids
from demo_models.weights import HEADS, HIDDEN, LAYERS, draw

VISION_LAYERS = AUDIO_LAYERS = 2
PATCH, MERGE = 14, 2
MEL_BINS = 32
MAX_CLIP_S = 8  # every clip is padded to this
NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TEMPLATE = chat_template(
    image="<|vision_bos|><|IMAGE|><|vision_eos|>",
    video="<|vision_bos|><|VIDEO|><|vision_eos|>",
    audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
)


def write(directory: Path) -> None:
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniThinkerForConditionalGeneration

    tokenizer = make_tokenizer(tuple(NAMED_TOKENS.values()), TEMPLATE, **NAMED_TOKENS)
    thinker = make_thinker_config(tokenizer)
    model = Qwen2_5OmniThinkerForConditionalGeneration(thinker)
    gains = {"visual": 1.5, "audio_tower": 1.5}
    draw(model, tokenizer, model.model.embed_tokens.weight, model.lm_head.weight, gains)
    # As the whole model's checkpoint has it.
    weights = {f"thinker.{name}": weight for name, weight in model.state_dict().items()}
    model.save_pretrained(directory, state_dict=weights)
    config = Qwen2_5OmniConfig(
        architectures=["Qwen2_5OmniModel"],
        thinker_config=thinker.to_dict(),
        enable_audio_output=False,
        dtype="float32",
    )
    config.save_pretrained(directory)
    make_processor(tokenizer).save_pretrained(directory)


def make_processor(tokenizer):
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2VLImageProcessor,
        WhisperFeatureExtractor,
    )
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    unit = PATCH * MERGE
    size = {"shortest_edge": (2 * unit) ** 2, "longest_edge": (37 * unit) ** 2}
    geometry = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "size": size}
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(**geometry),
        video_processor=Qwen2VLVideoProcessor(**geometry),
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=MAX_CLIP_S),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    )


def make_thinker_config(tokenizer):
    from transformers import Qwen2_5OmniThinkerConfig

    image, video, audio, audio_start, audio_end, user = token_ids(
        tokenizer, "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "user"
    )
    return Qwen2_5OmniThinkerConfig(
        text_config=text_config(tokenizer)
        | {
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [8, 12, 12],
            },
        },
        vision_config={
            "depth": VISION_LAYERS,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_heads": HEADS,
            "out_hidden_size": HIDDEN,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 4 * PATCH * MERGE,
            "fullatt_block_indexes": [VISION_LAYERS - 1],
        },
        audio_config={
            "num_mel_bins": MEL_BINS,
            "encoder_layers": AUDIO_LAYERS,
            "encoder_attention_heads": HEADS,
            "encoder_ffn_dim": 2 * HIDDEN,
            "d_model": HIDDEN,
            "output_dim": HIDDEN,
            "max_source_positions": 50 * MAX_CLIP_S,
            "n_window": 100,
        },
        image_token_index=image,
        video_token_index=video,
        audio_token_index=audio,
        audio_start_token_id=audio_start,
        audio_end_token_id=audio_end,
        user_token_id=user,
        tie_word_embeddings=False,
        dtype="float32",
    )

"""Models that hear."""

from typing import Any

import transformers as hf
from vllm.model_executor.models.whisper import ISO639_1_SUPPORTED_LANGS

from tests.families.makers.base import (
    HEADS,
    HIDDEN,
    MROPE,
    VISION_LAYERS,
    Settings,
    Tiny,
    chat,
    decoder,
    ears,
    ids,
    tower,
    vision,
    vocabulary,
)
from tests.families.makers.qwens import OMNI, OMNI_TEMPLATE, geometry

BINS = 32


def _sizes(**more: Any) -> dict[str, Any]:
    sizes = vision(num_mel_bins=BINS, **more)
    del sizes["image_size"], sizes["patch_size"]
    return sizes


def audio_flamingo3() -> Tiny:
    """Audio Flamingo 3: windows of thirty seconds."""
    template = chat(audio="<sound>")
    tokenizer = vocabulary(template, "<sound>")
    config = hf.AudioFlamingo3Config(
        audio_config=_sizes(),
        text_config=decoder(tokenizer, "qwen2"),
        audio_token_id=ids(tokenizer, "<sound>")[0],
        architectures=["AudioFlamingo3ForConditionalGeneration"],
    )
    ear = hf.WhisperFeatureExtractor(feature_size=BINS)
    processor = hf.AudioFlamingo3Processor(ear, tokenizer, chat_template=template)
    return Tiny(config, tokenizer, processor)


_SPOKEN = ("<|startoftranscript|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>")


def whisper() -> Tiny:
    """Whisper: an encoder and a decoder, which no chat goes through."""
    languages = [f"<|{code}|>" for code in ISO639_1_SUPPORTED_LANGS]
    tokenizer = vocabulary(chat(), *_SPOKEN, *languages)
    config = hf.WhisperConfig(
        **ears(),
        vocab_size=len(tokenizer),
        decoder_layers=VISION_LAYERS,
        decoder_attention_heads=HEADS,
        decoder_ffn_dim=2 * HIDDEN,
        max_target_positions=4096,
        decoder_start_token_id=ids(tokenizer, _SPOKEN[0])[0],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["WhisperForConditionalGeneration"],
        dtype="float32",
    )
    ear = hf.WhisperFeatureExtractor(feature_size=BINS)
    return Tiny(config, tokenizer, hf.WhisperProcessor(ear, tokenizer))


def glm_asr() -> Tiny:
    """GLM-ASR: an encoder with rotary positions."""
    template = chat(audio="<|begin_of_audio|><|pad|><|end_of_audio|>")
    tokenizer = vocabulary(template, "<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>")
    config = hf.GlmAsrConfig(
        audio_config=_sizes(
            num_key_value_heads=HEADS,
            intermediate_size=4 * HIDDEN,
            rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            },
        ),
        text_config=decoder(tokenizer, "llama"),
        audio_token_id=ids(tokenizer, "<|pad|>")[0],
        architectures=["GlmAsrForConditionalGeneration"],
    )  # fmt: skip
    ear = hf.WhisperFeatureExtractor(feature_size=BINS)
    processor = hf.GlmAsrProcessor(ear, tokenizer, chat_template=template)
    return Tiny(config, tokenizer, processor)


def qwen2_5_omni() -> Tiny:
    """Qwen2.5-Omni's thinker: pictures, films and sound, interleaved by time."""
    tokenizer = vocabulary(OMNI_TEMPLATE, **OMNI)
    image, video, audio, start, end, audio_start, audio_end = ids(tokenizer, *OMNI.values())
    windows: Settings = {"window_size": 4 * 28, "fullatt_block_indexes": [VISION_LAYERS - 1]}
    thinker = {
        "text_config": decoder(tokenizer, rope_parameters=MROPE),
        "vision_config": tower(**windows),
        "audio_config": ears(output_dim=HIDDEN, n_window=100),
        "image_token_index": image, "video_token_index": video, "audio_token_index": audio,
        "image_token_id": image, "video_token_id": video, "audio_token_id": audio,
        "vision_start_token_id": start, "vision_end_token_id": end,
        "audio_start_token_id": audio_start, "audio_end_token_id": audio_end,
        "position_id_per_seconds": 25, "seconds_per_chunk": 2,
    }  # fmt: skip
    config = hf.Qwen2_5OmniConfig(
        architectures=["Qwen2_5OmniForConditionalGeneration"],
        thinker_config=thinker,
        enable_audio_output=False,
    )
    processor = hf.Qwen2_5OmniProcessor(
        hf.Qwen2VLImageProcessor(**geometry(14)),
        hf.Qwen2VLVideoProcessor(**geometry(14)),
        hf.WhisperFeatureExtractor(feature_size=BINS),
        tokenizer,
        chat_template=OMNI_TEMPLATE,
    )
    return Tiny(config, tokenizer, processor)


def qwen2_5_omni_model() -> Tiny:
    """The same under the name that its first checkpoints have."""
    tiny = qwen2_5_omni()
    return Tiny(tiny.config, tiny.tokenizer, tiny.processor, architecture="Qwen2_5OmniModel")

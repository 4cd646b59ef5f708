"""All cases: the families, and engines that work in another mode."""

from collections.abc import Iterator

from tests.families.case import DEMO, Case
from tests.families.questions import Medium
from tests.families.unbuilt import UNBUILT

Takes = frozenset[Medium]
IMAGE: Takes = frozenset({"image"})
VIDEO: Takes = frozenset({"video"})
SEEING: Takes = frozenset({"image", "video"})
HEARING: Takes = frozenset({"sound"})
ALL: Takes = frozenset({"image", "video", "sound"})
EMBEDDED: Takes = frozenset({"image", "embeddings"})
CACHED = "--enable-prefix-caching"
BFLOAT16 = "--dtype=bfloat16"
TRUST = "--trust-remote-code"
CODE = (TRUST,)
WHOLE = (TRUST, "--mm-encoder-tp-mode=data")
"""Of models whose projector gets transposed numbers, which vLLM's product on CPUs doesn't take,
unless the encoder is not split."""
UNCACHED = "--no-enable-prefix-caching"
NEMOTRON = (TRUST, BFLOAT16, UNCACHED)

_FAMILIES: dict[str, tuple[str, Takes] | tuple[str, Takes, tuple[str, ...]]] = {
    "AriaForConditionalGeneration": ("aria", IMAGE),
    "AudioFlamingo3ForConditionalGeneration": ("audio_flamingo3", HEARING),
    "BagelForConditionalGeneration": ("bagel", IMAGE),
    "Blip2ForConditionalGeneration": ("blip2", IMAGE),
    "Cohere2VisionForConditionalGeneration": ("cohere2_vision", IMAGE),
    "CohereCompassForConditionalGeneration": ("cohere_compass", IMAGE),
    "Cosmos3EdgeForConditionalGeneration": ("cosmos3_edge", SEEING),
    "Cosmos3ForConditionalGeneration": ("cosmos3", SEEING),
    "Eagle2_5_VLForConditionalGeneration": ("eagle2_5_vl", IMAGE, CODE),
    "Exaone4_5_ForConditionalGeneration": ("exaone4_5", SEEING),
    "GLM4VForCausalLM": ("glm_4v", IMAGE),
    "Gemma4ForConditionalGeneration": ("gemma4", SEEING),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", ALL),
    "GlmAsrForConditionalGeneration": ("glm_asr", HEARING),
    "Glm4vForConditionalGeneration": ("glm4v", SEEING),
    "Glm4vMoeForConditionalGeneration": ("glm4v_moe", SEEING),
    "GlmOcrForConditionalGeneration": ("glm_ocr", SEEING),
    "Granite4VisionForConditionalGeneration": ("granite4_vision", IMAGE),
    "NVLM_D": ("nvlm_d", IMAGE, CODE),
    "Ovis": ("ovis", IMAGE),
    "Ovis2_5": ("ovis2_5", SEEING, CODE),
    "Ovis2_6ForCausalLM": ("ovis2_6", SEEING, CODE),
    "Ovis2_6_MoeForCausalLM": ("ovis2_6_moe", SEEING, CODE),
    "PaddleOCRVLForConditionalGeneration": ("paddle_ocr_vl", IMAGE),
    "Phi4ForCausalLMV": ("phi4_siglip", IMAGE, CODE),
    "PixtralForConditionalGeneration": ("pixtral", IMAGE),
    "QianfanOCRForConditionalGeneration": ("qianfan_ocr", IMAGE),
    "Qwen2_5OmniForConditionalGeneration": ("qwen2_5_omni", ALL),
    "Qwen2_5OmniModel": ("qwen2_5_omni_model", ALL),
    "Gemma3ForConditionalGeneration": ("gemma3", IMAGE),
    "H2OVLChatModel": ("h2o_vl", IMAGE, CODE),
    "Idefics3ForConditionalGeneration": ("idefics3", IMAGE),
    "InternS1ForConditionalGeneration": ("intern_s1", SEEING),
    "InternS1ProForConditionalGeneration": ("intern_s1_pro", SEEING),
    "InternS2MobiusForConditionalGeneration": ("intern_s2_mobius", SEEING, (CACHED, BFLOAT16)),
    "InternS2PreviewForConditionalGeneration": ("intern_s2_preview", SEEING, (CACHED, BFLOAT16)),
    "OpenCUAForConditionalGeneration": ("open_cua", IMAGE),
    "InternVLChatModel": ("intern_vl_chat", SEEING, CODE),
    "InternVLForConditionalGeneration": ("internvl_hf", SEEING),
    "IsaacForConditionalGeneration": ("isaac", IMAGE),
    "Lfm2VlForConditionalGeneration": ("lfm2_vl", IMAGE, (CACHED,)),
    "LightOnOCRForConditionalGeneration": ("light_on_ocr", IMAGE),
    "Llama4ForConditionalGeneration": ("llama4", IMAGE),
    "Llama_Nemotron_Nano_VL": ("nemotron_nano_vl", IMAGE, (TRUST, BFLOAT16)),
    "LlavaForConditionalGeneration": ("llava", IMAGE),
    "LlavaNextForConditionalGeneration": ("llava_next", IMAGE),
    "LlavaNextVideoForConditionalGeneration": ("llava_next_video", VIDEO),
    "LlavaOnevisionForConditionalGeneration": ("llava_onevision", SEEING),
    "LlavaOnevision2ForConditionalGeneration": ("llava_onevision2", SEEING, CODE),
    "MiniCPMV4_6ForConditionalGeneration": ("mini_cpm_v4_6", SEEING, (CACHED, BFLOAT16)),
    "MiniCPMV4_7ForConditionalGeneration": ("mini_cpm_v4_7", SEEING, (CACHED, BFLOAT16)),
    "Mistral3ForConditionalGeneration": ("mistral3", IMAGE),
    "MuseGlimmerForConditionalGeneration": ("muse_glimmer", SEEING),
    "PaliGemmaForConditionalGeneration": ("paligemma", IMAGE),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", SEEING),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", SEEING),
    "Qwen2AudioForConditionalGeneration": ("qwen2_audio", HEARING),
    "Qwen3ASRForConditionalGeneration": ("qwen3_asr", HEARING),
    "Qwen3OmniMoeForConditionalGeneration": ("qwen3_omni", ALL),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", SEEING),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", SEEING),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", SEEING, (CACHED, BFLOAT16)),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", SEEING, (CACHED, BFLOAT16)),
    "SkyworkR1VChatModel": ("skywork_r1v", IMAGE, CODE),
    "Step3VLForConditionalGeneration": ("step3_vl", IMAGE),
    "Step3p7ForConditionalGeneration": ("step3p7", IMAGE, WHOLE),
    "StepVLForConditionalGeneration": ("step_vl", IMAGE, WHOLE),
    "VoxtralForConditionalGeneration": ("voxtral", HEARING),
    "DeepseekOCRForCausalLM": ("deepseek_ocr", IMAGE),
    "DeepseekOCR2ForCausalLM": ("deepseek_ocr2", IMAGE),
    "FunAudioChatForConditionalGeneration": ("fun_audio_chat", HEARING),
    "HfMoondream": ("hf_moondream", IMAGE),
    "Moondream3ForCausalLM": ("moondream3", IMAGE),
    "KimiK25ForConditionalGeneration": ("kimi_k25", IMAGE),
    "MoonshotKimiaForCausalLM": ("kimi_audio", HEARING),
    "MossAudioModel": ("moss_audio", HEARING, CODE),
    "NemotronH_Nano_Omni_Reasoning_V3": ("nemotron_nano_omni", ALL, NEMOTRON),
    "NemotronH_Nano_VL_V2": ("nemotron_h_nano_vl", SEEING, NEMOTRON),
    "NemotronH_Omni_Reasoning_V3": ("nemotron_omni", ALL, NEMOTRON),
    "NemotronH_Super_Omni_Reasoning_V3": ("nemotron_super_omni", ALL, NEMOTRON),
}
"""By architecture: who makes it, what it takes, and flags that it needs."""

_TEMPLATES = {"kimi_audio": "--chat-template={dir}/kimi_audio/chat_template.jinja"}
"""Of makers whose tokenizer keeps no chat template."""

_DUMMY = '"draft_load_config": {"load_format": "dummy"}'
_NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
_EAGLE = '{"method": "eagle", "model": "{dir}/eagle", "num_speculative_tokens": 2, ' + _DUMMY + "}"
_MTP = '{"method": "mtp", "num_speculative_tokens": 1, ' + _DUMMY + "}"
_SMALL = ("--num-gpu-blocks-override=24", "--max-model-len=640", "--max-num-batched-tokens=640")
_PRUNING = "--worker-cls=tests.families.pruning_worker.PruningWorker"
_PROCESSES = "--distributed-executor-backend=mp"

MODES: tuple[Case, ...] = (
    Case("ngram", "llama", mode="n-gram drafting", flags=(f"--speculative-config={_NGRAM}",)),
    Case("eagle", "llama", mode="EAGLE drafting", flags=(f"--speculative-config={_EAGLE}",),
         draft="eagle"),
    Case("mtp", "glm4_moe", mode="multi-token prediction",
         flags=(f"--speculative-config={_MTP}",)),
    Case("window", "mistral_window", mode="every layer with a window"),
    Case("windows", "gemma2", mode="every other layer with a window"),
    Case("mamba", "granite_hybrid", mode="Mamba beside attention",
         flags=(UNCACHED,)),
    Case("mamba-cached", "granite_hybrid", mode="Mamba beside attention, states cached",
         flags=(CACHED, "--mamba-cache-mode=align")),
    Case("linear", "qwen3_next", mode="linear attention", flags=(CACHED, BFLOAT16)),
    Case("experts", "mixtral", mode="experts"),
    Case("two-devices", DEMO, SEEING, mode="tensor parallel 2",
         flags=("--tensor-parallel-size=2", _PROCESSES)),
    Case("two-ranks", DEMO, IMAGE, mode="data parallel 2", flags=("--data-parallel-size=2",),
         alone=False),
    Case("no-prefix-cache", "llava", IMAGE, mode="prefix caching off",
         flags=(UNCACHED,)),
    Case("small-cache", "llava", IMAGE, mode="a KV cache of 24 blocks", flags=_SMALL),
    Case("small-media-cache", "qwen2_vl", SEEING, mode="a media cache of 1 MB",
         flags=("--mm-processor-cache-gb=0.001",)),
    Case("no-media-cache", "qwen2_vl", SEEING, mode="no media cache",
         flags=("--mm-processor-cache-gb=0",)),
    Case("quantised", DEMO, SEEING, mode="weights quantised as they are loaded",
         flags=("--quantization=int8_per_channel_weight_only", BFLOAT16)),
    Case("transformers", DEMO, IMAGE, mode="--model-impl transformers",
         flags=("--model-impl=transformers",)),
    Case("host-normalize", DEMO, SEEING, mode="--no-mm-device-do-normalize",
         flags=("--no-mm-device-do-normalize",)),
    Case("embeddings", "llava_with_room", EMBEDDED, mode="--enable-prompt-embeds",
         flags=("--enable-prompt-embeds",)),
    Case("pruned-videos", "qwen3_vl", SEEING, mode="--video-pruning-rate 0.5",
         flags=("--video-pruning-rate=0.5", _PRUNING)),
)  # fmt: skip
"""Engines that work in another mode."""


def _cases() -> Iterator[Case]:
    for architecture, (maker, media, *flags) in _FAMILIES.items():
        name = maker.replace("_", "-")
        template = (_TEMPLATES[maker],) if maker in _TEMPLATES else ()
        yield Case(
            name,
            maker,
            media,
            architecture,
            flags=flags[0] if flags else (),
            both=(CODE if flags and TRUST in flags[0] else ()) + template,
        )
    yield Case("pixtral-hf", "pixtral_hf", IMAGE, "LlavaForConditionalGeneration")
    yield from MODES


CASES: dict[str, Case] = {case.name: case for case in _cases()}


NEWER = "newer than vLLM 0.32: nobody has made a tiny model of it yet"


def registry() -> dict[str, str]:
    """Every architecture of vLLM's multimodal registry, with the reason why it has no case, or
    nothing."""
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    return {
        name: "" if name in _FAMILIES else UNBUILT.get(name, NEWER) for name in _MULTIMODAL_MODELS
    }

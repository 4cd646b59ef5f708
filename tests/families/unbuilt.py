"""Architectures of vLLM's registry that have no case, each with its reason."""

from collections.abc import Mapping

_PACKAGE = "it needs the package `{}`, which neither vLLM nor mmrouter installs"
_HEARS_BY_TORCHAUDIO = (
    "it hears by the package `torchaudio`, and no case is written since that is installed on CPUs"
)
_REMOTE = "its configuration or its processor is code that only its repository has"
_ENCODER_DECODER = "an encoder-decoder model, which no chat goes through"
_REALTIME = "for a stream of sound in real time, which no chat goes through"
_ATTENTION = "its attention has a kernel for GPUs only"
_NORMS = "its norms have kernels for GPUs only"
_STUB = "vLLM itself says that it runs on GPUs only"
_RUNNER = "vLLM runs diffusion with Triton only, which has no backend for CPUs here"
_BLOCKS = (
    "vLLM gives its cache blocks of 128 tokens, and its attention on CPUs without AMX takes only 16"
)
_TRANSCRIBES = "it only transcribes, which no chat goes through"

_BY_REASON: Mapping[str, str] = {
    _PACKAGE.format("timm"): """
        DeepseekVLV2ForCausalLM KananaVForConditionalGeneration OpenVLAForActionPrediction
        Gemma3nForConditionalGeneration
    """,
    _HEARS_BY_TORCHAUDIO: """
        CohereAsrForConditionalGeneration FunASRForConditionalGeneration
        GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration
        MiDashengLMModel MiMoV2OmniForCausalLM
    """,
    _PACKAGE.format("num2words"): "SmolVLMForConditionalGeneration",
    _REMOTE: """
        BeeForConditionalGeneration DotsOCRForCausalLM
        Ernie4_5_VLMoeForConditionalGeneration
        KeyeForConditionalGeneration
        KeyeVL1_5ForConditionalGeneration KimiVLForConditionalGeneration MiniCPMO MiniCPMV
        MolmoForCausalLM Molmo2ForConditionalGeneration OpenPanguVLForConditionalGeneration
        Phi3VForCausalLM Phi4MMForCausalLM RForConditionalGeneration UltravoxModel
    """,
    _ENCODER_DECODER: """
        FireRedASR2ForConditionalGeneration NemotronParseForConditionalGeneration
        WhisperForConditionalGeneration
    """,
    _REALTIME: "Qwen3ASRRealtimeGeneration VoxtralRealtimeGeneration",
    _ATTENTION: """
        DeepseekV41ForCausalLM Dots3NoteForCausalLM Glm5NextForConditionalGeneration
        KimiK3ForConditionalGeneration UnlimitedOCRForCausalLM
    """,
    _NORMS: "MiniMaxM3SparseForConditionalGeneration Qwen4ExpForConditionalGeneration",
    _STUB: "DeepseekV4ForConditionalGeneration",
    _RUNNER: "DiffusionGemmaForBlockDiffusion",
    _BLOCKS: "BailingMoeV3VLForConditionalGeneration",
    _TRANSCRIBES: "MossTranscribeDiarizeForConditionalGeneration",
}

UNBUILT: Mapping[str, str] = {
    name: reason for reason, names in _BY_REASON.items() for name in names.split()
}

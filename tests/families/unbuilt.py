"""Architectures of vLLM's registry that have no case, each with its reason."""

from collections.abc import Mapping

_PACKAGE = "it needs the package `{}`, which neither vLLM nor mmrouter installs"
_REMOTE = "its configuration or its processor is code that only its repository has"
_ENCODER_DECODER = "an encoder-decoder model, which no chat goes through"
_REALTIME = "for a stream of sound in real time, which no chat goes through"
_NOT_TRIED = "nobody has made a tiny model of it yet"

_BY_REASON: Mapping[str, str] = {
    _PACKAGE.format("timm"): """
        DeepseekVLV2ForCausalLM KananaVForConditionalGeneration OpenVLAForActionPrediction
        Gemma3nForConditionalGeneration
    """,
    _PACKAGE.format("torchaudio"): """
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
    _NOT_TRIED: """
        BailingMoeV3VLForConditionalGeneration
        Cosmos3ForConditionalGeneration
        Cosmos3EdgeForConditionalGeneration DeepseekOCRForCausalLM DeepseekOCR2ForCausalLM
        DeepseekV4ForConditionalGeneration DeepseekV41ForCausalLM Dots3NoteForCausalLM
        UnlimitedOCRForCausalLM FunAudioChatForConditionalGeneration
        DiffusionGemmaForBlockDiffusion
        Glm5NextForConditionalGeneration InternS1ProForConditionalGeneration
        InternS2MobiusForConditionalGeneration
        IsaacForConditionalGeneration KimiK25ForConditionalGeneration
        KimiK3ForConditionalGeneration MoonshotKimiaForCausalLM
        MossTranscribeDiarizeForConditionalGeneration
        LlavaOnevision2ForConditionalGeneration MiniMaxM3SparseForConditionalGeneration
        Moondream3ForCausalLM MossAudioModel HfMoondream NemotronH_Nano_VL_V2
        NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3
        NemotronH_Omni_Reasoning_V3 MuseGlimmerForConditionalGeneration
        Qwen4ExpForConditionalGeneration
    """,
}

UNBUILT: Mapping[str, str] = {
    name: reason for reason, names in _BY_REASON.items() for name in names.split()
}

"""Every environment variable that vLLM's processing of requests reads, in one place each: how
frontends come to know of it, or why they need not. ``test_engine_arguments.py`` looks them up.
"""

from collections.abc import Mapping
from types import MappingProxyType

ON_CARD: Mapping[str, str] = MappingProxyType(
    {
        "VLLM_VIDEO_LOADER_BACKEND": "environment.video_loader_backend",
        "VLLM_USE_RUST_FRONTEND": "model.mm_device_do_normalize",  # all that it does here
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "model.max_model_len",  # likewise
        "VLLM_MODEL_REDIRECT_PATH": "model.model",
        "PYTHONHASHSEED": "cache.none_hash",
    }
)
"""Variables whose effect is on the card, with the field there."""

_OF_EACH_SIDE = "where each side finds and keeps files"
_MEDIA_ARRIVE = "frontends fetch and decode media, by limits of their own"
_REQUESTS = "limits on requests: the frontend's own, and workers check theirs again"
_SAME = "the same tokens, by other code"
_COMPUTING = "how the engine computes"
_WIRE = "of the worker's process alone"

_REASONS: Mapping[str, str] = {
    _OF_EACH_SIDE: "VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CACHE_ROOT VLLM_USE_MODELSCOPE",
    _MEDIA_ARRIVE: """
        VLLM_AUDIO_FETCH_TIMEOUT VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT
        VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES
        VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_IMAGE_PIXELS VLLM_MEDIA_CACHE
        VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MEDIA_CACHE_MAX_SIZE_MB
        VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_CONNECTOR VLLM_MEDIA_LOADING_THREAD_COUNT
        VLLM_MEDIA_URL_ALLOW_REDIRECTS
    """,
    _REQUESTS: """
        VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES
        VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
        VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
    """,
    _SAME: "VLLM_USE_FASTOKENS",
    _COMPUTING: """
        VLLM_BATCH_INVARIANT VLLM_MLA_DISABLE VLLM_USE_DEEP_GEMM_E8M0
        VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB
    """,
    _WIRE: """
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
        VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
    """,
}

IRRELEVANT: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _REASONS.items() for name in names.split()}
)
"""Variables that are irrelevant to a frontend, because …"""

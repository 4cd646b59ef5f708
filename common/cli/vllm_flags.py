"""Every flag of ``vllm serve``: the process that takes it, or the reason why none does.

A frontend takes the server's flags and a few of the engine's; a worker takes the engine's. A flag
without effect is refused by name. :mod:`common.vllm_compat.engine_arguments` has the engine
arguments that no worker takes. A test finds each flag of vLLM's parser in exactly one place.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from common.vllm_compat import engine_arguments

_IN_THE_APP: Final = "vLLM's app has it"
_BY_UVICORN: Final = "the HTTP server has it"

_SERVER: Final[Mapping[str, str]] = {
    _IN_THE_APP: """
        chat_template chat_template_content_format trust_request_chat_template
        trust_request_mm_kwargs default_chat_template_kwargs reasoning_effort_map
        response_role
        return_tokens_as_token_ids enable_auto_tool_choice exclude_tools_when_tool_choice_none
        tool_call_parser tool_strict_level tool_server max_log_len
        enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking
        enable_force_include_usage sse_keep_alive_interval enable_tokenizer_info_endpoint
        enable_log_outputs enable_log_deltas cohere_is_reasoning_model cohere_format
        anthropic_disabled_thinking_effort log_error_stack fingerprint_mode fingerprint_value
        allow_credentials allowed_origins allowed_methods allowed_headers middleware
        enable_request_id_headers disable_fastapi_docs enable_offline_docs enable_scale_out
        root_path
    """,
    _BY_UVICORN: """
        host port uds uvicorn_log_level disable_uvicorn_access_log
        disable_access_log_for_endpoints ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs
    """,
    "tokens are checked before vLLM's app, with those of --api-key-file": "api_key",
    "TLS up to 1.2, as OpenSSL names ciphers": "ssl_ciphers",
    "the files are looked at every few seconds": "enable_ssl_refresh",
    "largest head of a request; 65536 here by default, and bodies have --max-body-mb": (
        "h11_max_incomplete_event_size"
    ),
    "most headers of a request": "h11_max_header_count",
    "loaded before the app is built": "tool_parser_plugin",
    "another name of --processes": "api_server_count",
    "read here and not by vLLM, with our own flags": "config",
}

SERVER: Final[Mapping[str, str]] = MappingProxyType(
    {name: how for how, names in _SERVER.items() for name in names.split()}
)
"""Arguments of the server that work at a frontend, and how."""

_OTHER_SERVERS: Final = "it is for the servers that `vllm serve` starts for each rank"

SERVER_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model_tag": "the model comes from the workers",
        "headless": "a frontend has no engine; start workers on each node",
        "grpc": "the frontend speaks HTTP only",
        "grpc_port": "the frontend speaks HTTP only",
        "data_parallel_supervisor_port": _OTHER_SERVERS,
        "dp_supervisor_probe_interval_s": _OTHER_SERVERS,
        "dp_supervisor_probe_timeout_s": _OTHER_SERVERS,
        "dp_supervisor_probe_failure_threshold": _OTHER_SERVERS,
        "tokens_only": engine_arguments.REFUSED["tokens_only"],
        "enable_flash_late_interaction": "a query's vectors would have to be at the worker of each "
        "of its documents, so frontends compare them",
    }
)
"""Arguments of the server that no frontend takes."""

SERVER_AT_WORKER: Final[Mapping[str, str]] = MappingProxyType(
    {"lora_modules": "adapters, which frontends learn from cards"}
)
"""Arguments of the server that workers take in its place, and how."""

ENGINE_AT_FRONTEND: Final[Mapping[str, str]] = MappingProxyType(
    {
        "served_model_name": "names of this frontend's own, in place of the workers'",
        "trust_remote_code": "needed beside the workers' own where the model brings code",
        "model_class_overrides": "must be the workers'",
        "reasoning_parser": "where the workers have none",
        "hf_token": "for the tokenizer and the processor",
        "renderer_num_workers": "threads of this frontend's renderer",
        "mm_processor_cache_gb": "media kept processed where there is no arena",
        "enable_log_requests": "requests as users send them",
        "allowed_local_media_path": "media are fetched here",
        "allowed_media_domains": "media are fetched here",
        "logging_config": "of vLLM's lines in this process",
        "log_config_file": "of vLLM's lines in this process",
        "log_level": "of mmrouter's lines and vLLM's in this process",
        "otlp_traces_endpoint": "spans of requests here; workers need it for theirs",
        "shutdown_timeout": "another name of --drain-timeout",
    }
)
"""Arguments of the engine that work at a frontend too, and how."""


def refusal_at_frontend(name: str) -> str | None:
    """Return why a frontend refuses vLLM's argument; None if it takes it, or does not know it."""
    if name in SERVER_REFUSED:
        return SERVER_REFUSED[name]
    if name in SERVER or name in ENGINE_AT_FRONTEND:
        return None
    if name in engine_arguments.REFUSED:
        return engine_arguments.REFUSED[name]
    if name in engine_arguments.ON_CARD or name in SERVER_AT_WORKER:
        return "frontends learn it from the workers, so give it to them"
    reason = engine_arguments.IRRELEVANT.get(name)
    return reason and f"it is for workers, if at all: {reason}"


def refusal_at_worker(name: str) -> str | None:
    """Return why a worker refuses vLLM's argument; None if it takes it, or does not know it."""
    if name == "headless":
        return (
            "it is for a node whose ranks another node's server serves, which a worker can't: "
            "start one on each node, with --data-parallel-hybrid-lb"
        )
    if name in SERVER and name != "config":
        return "it is the server's, so give it to the frontend"
    if name in SERVER_REFUSED and name != "model_tag":
        return SERVER_REFUSED[name]
    # Arguments refused only for certain values are left to check_arguments.
    return engine_arguments.IDLE.get(name)

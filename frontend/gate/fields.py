"""Limits of each field of a request's body: one table for all routes.

A field has the same name and the same meaning on all of vLLM's routes. ``docs/limits.md`` is made
from the table, and a test finds each field of vLLM's request models in it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Limit(NamedTuple):
    """Limits of the fields of one kind.

    Attributes:
        depth: of lists and objects within each other; 0 for a plain value.
        values: entries of all lists and objects in it.
        characters: of all strings and names in it; None where ``--max-body-mb`` bounds them, or
            where text is measured before it is tokenized.
        items: entries of the outermost list or object.
        why: the reason, for the page.
    """

    depth: int
    values: int
    characters: int | None
    items: int
    why: str


PLAIN: Final = Limit(0, 1, 8192, 1, "numbers, switches, names and ids are short")
TEXT: Final = Limit(0, 1, None, 1, "measured against the context before it is tokenized")
WORDS: Final = Limit(
    1, 256, 16 << 10, 256, "each is tokenized, or looked for in the text, outside of any queue"
)
TOKENS: Final = Limit(
    1, 1 << 18, 4 << 20, 1 << 18, "as many as the largest vocabularies have tokens"
)
OPTIONS: Final = Limit(16, 1024, 64 << 10, 256, "small objects of options")
TEMPLATE_OPTIONS: Final = Limit(
    32, 16384, 1 << 20, 256, "values of a chat template, which may be documents or tools"
)
TEMPLATE: Final = Limit(0, 1, 256 << 10, 1, "the longest templates of models have 30 KiB")
STRUCTURE: Final = Limit(
    64, 16384, 1 << 20, 16384, "JSON schemas, grammars and choices; 128 KiB of them are compiled"
)
TOOLS: Final = Limit(64, 65536, 4 << 20, 512, "OpenAI takes 128, Open WebUI sends 36")
MESSAGES: Final = Limit(
    64, 32768, None, 2048, "one costs up to 60 µs of the event loop to validate"
)
INPUTS: Final = Limit(
    8, 1 << 20, None, 1 << 20, "prompts as text or tokens; `--max-pooling-inputs` bounds texts"
)
RESULTS: Final = Limit(16, 1 << 18, None, 1 << 14, "outputs that come back to be detokenized")
CHUNK: Final = Limit(
    16,
    4096,
    256 << 10,
    64,
    "one step of a stream to be detokenized: characters that its tokens leave unfinished cost "
    "quadratic time: 0.04 s for 1,000 of them, 0.6 s for 4,000",
)
UNKNOWN: Final = Limit(
    32, 4096, 1 << 20, 4096, "vLLM ignores what it does not know, and so do frontends"
)

OF_EACH_PROMPT: Final = frozenset(
    {WORDS, TOKENS, OPTIONS, TEMPLATE_OPTIONS, TEMPLATE, STRUCTURE, TOOLS}
)
"""Kinds of fields that a request has once, and that vLLM reads for each prompt or conversation."""

KINDS: Final[Mapping[str, Limit]] = MappingProxyType(
    {
        "plain": PLAIN,
        "text": TEXT,
        "words": WORDS,
        "tokens": TOKENS,
        "options": OPTIONS,
        "template options": TEMPLATE_OPTIONS,
        "template": TEMPLATE,
        "structure": STRUCTURE,
        "tools": TOOLS,
        "messages": MESSAGES,
        "inputs": INPUTS,
        "results": RESULTS,
        "chunk": CHUNK,
    }
)

_FIELDS: Final[Mapping[str, str]] = {
    "plain": """
        add_generation_prompt add_special_tokens apply_softmax background best_of cache_salt
        continue_final_message delay_iterations dimensions early_stopping echo embed_dtype
        enable_response_messages encoding_format endianness frequency_penalty
        guided_decoding_backend ignore_eos include_reasoning include_stop_str_in_output input_type
        is_3d_lora_weight item_first joint language length_penalty load_inplace logprobs lora_int_id
        lora_name lora_path max_completion_tokens max_iterations max_output_tokens max_tokens
        max_tokens_per_doc max_tokens_per_query max_tool_calls min_p min_tokens mm_payload model n
        output_dimension output_mode padding parallel_tool_calls presence_penalty
        previous_response_id priority profile_prefix prompt_cache_key prompt_cache_retention
        prompt_logprobs prompt_tokens reasoning_effort reasoning_ended repetition_penalty request_id
        return_mm_kwargs return_prompt_text return_token_ids return_token_offsets return_token_strs
        return_tokens_as_token_ids return_weight_versions routed_experts_prompt_start
        safety_identifier seed service_tier session_id skip_special_tokens
        spaces_between_special_tokens store stream stream_continuous_usage_stats
        stream_include_usage stream_interval task temperature thinking_token_budget to_language
        top_k top_logprobs top_n top_p truncate truncate_prompt_tokens truncation truncation_side
        use_activation use_beam_search user watermarking
    """,
    "text": "instruction instructions suffix",
    "words": "bad_words stop stop_sequences timestamp_granularities embedding_types include",
    "tokens": """
        allowed_token_ids label_token_ids logit_bias logprob_token_ids prompt_token_ids
        stop_token_ids tokens
    """,
    "options": """
        ec_transfer_params kv_transfer_params late_chunking_params media_io_kwargs metadata
        mm_processor_kwargs output_config parse_context profiler_kwargs prompt_cache_options
        reasoning reasoning_parser_kwargs repetition_detection stream_options thinking tool_choice
        vllm_xargs
    """,
    "template options": "chat_template_kwargs",
    "template": "chat_template",
    "structure": "response_format structured_outputs text",
    "tools": "tools",
    "messages": "messages system previous_input_messages",
    "inputs": """
        audio content_parts data data_1 data_2 documents features hotwords images input inputs items
        prompt prompt_embeds queries query questions state text_1 text_2 texts token_ids
        token_offsets videos
    """,
    "results": "generate_response generate_responses stream_state",
    "chunk": "generate_chunk",
}

FIELDS: Final[Mapping[str, Limit]] = MappingProxyType(
    {name: KINDS[kind] for kind, names in _FIELDS.items() for name in names.split()}
)
"""The limit of each field that vLLM knows."""

NESTED: Final = frozenset({"chat_request", "completion_request", "sampling_params"})
"""Fields that hold a body, or a part of one."""

MAX_FIELDS: Final = 512
"""Fields of one body; the largest of vLLM's models has some 70."""

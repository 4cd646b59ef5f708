"""Bodies are judged by the table, in one pass, before anything is done for them."""

from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from pydantic import BaseModel
from transformers import ProcessorMixin, PythonBackend

from common.errors import RequestRejectedError
from frontend.gate.fail_fast import fail_fast
from frontend.gate.fields import FIELDS, INPUTS, KINDS, MESSAGES, NESTED, OF_EACH_PROMPT, UNKNOWN
from frontend.gate.judge import NOT_FROM_CLIENTS, RENDERER_OPTIONS, judge
from setup.limits_page import page
from tests.by_version import since_033

CHOICES = 16

COLLIDING = [(2**61 - 1) * number for number in range(1, 10_000)]
"""All have the hash 0."""

FORM_FIELDS = {"file", "timestamp_granularities[]"}
"""Come in forms only, which Starlette bounds."""

TEMPLATE_VARIABLES = {
    "add_generation_prompt", "chat_template", "continue_final_message", "documents", "tools",
}  # fmt: skip
"""Parameters of Hugging Face's renderer that are variables of templates too."""


def request_models(model: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        if each.__module__.startswith("vllm.entrypoints.") and each.__name__.endswith("Request"):
            yield each
        yield from request_models(each)


def test_each_field_of_vllms_requests_is_in_the_table() -> None:
    """A field of the next vLLM must not slip by: decide on it in ``frontend/gate/fields.py``."""
    fail_fast()  # imports all models
    fields = {
        name
        for model in request_models()
        for field, info in model.model_fields.items()
        for name in (field, info.alias, info.validation_alias)
        if isinstance(name, str)
    }
    assert len(fields) > 100
    assert fields - FIELDS.keys() - NESTED - FORM_FIELDS == set()


def test_what_renders_a_chat_has_no_parameter_that_nobody_decided_on() -> None:
    """A parameter of the next transformers must not slip by."""
    parameters = {
        name
        for renderer in (PythonBackend, ProcessorMixin)
        for name in signature(renderer.apply_chat_template).parameters
    }
    assert parameters - RENDERER_OPTIONS - TEMPLATE_VARIABLES == {"kwargs"}


def test_the_kinds_of_parts_are_those_that_were_looked_at() -> None:
    """All but the first take text, an address that the media policy judges, or data."""
    module = since_033("chat_utils.chat_message", "chat_utils")
    assert set(resolve_name(f"vllm.renderers.{module}:MM_PARSER_MAP")) == {
        NOT_FROM_CLIENTS, "text", "thinking", "input_text", "output_text", "input_image",
        "image_url", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "audio_url",
        "input_audio", "refusal", "video_url", "tool_reference",
    }  # fmt: skip


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * 10_000_000}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 2048},
        {"input": list(range(1_000_000))},
        {"input": ["x"] * 2048},
        {"prompt": [[1, 2, 3]] * CHOICES},
        {"logit_bias": {str(token): 1 for token in range(150_000)}},
        {"chat_template_kwargs": {"enable_thinking": False, "tools": [{"type": "function"}]}},
        {"mm_processor_kwargs": {"min_pixels": 4, "size": {"longest_edge": 5}}},
        {"n": CHOICES},
        {"n": "4", "prompt": ["a", "b"]},
        {"n": 4, "prompt": "a" * 1_000_000, "echo": True},
        {"n": 4, "prompt": [7] * 100_000, "return_token_ids": True},
        {"n": 4, "echo": True, "messages": [{"content": [{"image_url": "a" * 10_000_000}]}]},
        {"n": 4, "repetition_detection": {"max_pattern_size": 64, "min_count": 4}},
        {"questions": [{}] * 64, "input": "a" * 100_000},
        {"n": None, "temperature": None, "stop": None},
        {"something": {"that": [{"vLLM": "ignores"}]}},
        {"sampling_params": {"n": 2, "stop": ["a"]}},
        {"prompt": "a", "stop_token_ids": [1] * 200_000},
        {"prompt": ["a"] * 16, "stop": ["\n"], "structured_outputs": {"regex": "x" * 100_000}},
        {"messages": [{"role": "user"}] * 16, "tools": [{"type": "x" * 1000}] * 300},
        [],
        "x",
        None,
    ],
)
def test_what_clients_send_passes(body: Any) -> None:
    judge(body, CHOICES)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{}] * 2049}, "`messages` has 2049 entries"),
        ({"messages": [{"content": [{}] * 40_000}]}, "`messages` has more than 32768 values"),
        ({"messages": [{"content": ["a"] * 33_000}]}, "`messages` has more than 32768 values"),
        (
            {"messages": [{"content": ["a"] * 17_000}], "system": [{"text": ["a"] * 17_000}]},
            "messages and inputs have more than 32768 values",
        ),
        (
            {"input": [{"content": ["a"] * 17_000}], "documents": [{"content": ["a"] * 17_000}]},
            "messages and inputs have more than 32768 values",
        ),
        ({"stream_interval": 2000}, "`stream_interval` is more than 64"),
        (
            {"logit_bias": dict.fromkeys(map(str, COLLIDING), 1)},
            "`logit_bias` has a token id",
        ),
        (
            {"generate_response": {"prompt_logprobs": [{key: {} for key in map(str, COLLIDING)}]}},
            "`generate_response` has a token id",
        ),
        ({"stop_token_ids": COLLIDING}, "`stop_token_ids` has a token id"),
        ({"stop_token_ids": [1 << 20]}, "`stop_token_ids` has a token id"),
        (
            {"stop_token_ids": [*map(str, COLLIDING), "a"]},
            "`stop_token_ids` has a token id",
        ),
        ({"tokens": [1] * 270_000}, "`tokens` has 270000 entries"),
        (
            {
                "n": 16,
                "allowed_token_ids": [1] * 200_000,
                "stop_token_ids": [1] * 200_000,
                "logit_bias": {str(number): 1 for number in range(200_000)},
            },
            "what the 16 choices share",
        ),
        *[
            ({**choices, **sampled}, "each of the 16 choices is counted")
            for choices in ({"n": 16}, {"n": 4, "prompt": ["a"] * 4})
            for sampled in (
                {"allowed_token_ids": [1] * 70_000},
                {"logit_bias": {str(number): 1 for number in range(70_000)}},
                {"stop_token_ids": [1] * 70_000, "min_tokens": 10},
            )
        ],
        ({"messages": nested(100)}, "`messages` is nested deeper than 64"),
        ({"input": [{}] * 2049}, "`input` has 2049 entries"),
        ({"input": dict.fromkeys(map(str, range(2049)))}, "`input` has 2049 entries"),
        ({"input": [1] * 1_100_000}, "`input` has 1100000 entries"),
        ({"documents": [["x"] * 600_000] * 2}, "`documents` has more than 1048576 values"),
        ({"tools": [{}] * 513}, "`tools` has 513 entries"),
        ({"bad_words": ["x" * 20_000]}, "`bad_words` has more than 16384 characters"),
        ({"stop": [""] * 257}, "`stop` has 257 entries"),
        ({"temperature": [1]}, "`temperature` must not be a list or an object"),
        ({"n": {"a": 1}}, "`n` must not be a list or an object"),
        ({"model": "x" * 10_000}, "`model` has more than 8192 characters"),
        ({"metadata": {"k" * 70_000: 1}}, "`metadata` has more than 65536 characters"),
        (
            {"generate_chunk": {"choices": [{"token_ids": [195] * 5000}]}},
            "`generate_chunk` has more than 4096 values",
        ),
        ({"unheard_of": nested(40)}, "what vLLM does not know of the body is nested deeper"),
        ({str(number): 1 for number in range(600)}, "more than 512 fields"),
        (nested(40), "the body is nested deeper than 32"),
        ({"chat_request": {"messages": [{}] * 2049}}, "`messages` has 2049 entries"),
        ({"sampling_params": {"n": 17}}, "asks for 17 choices"),
        ({"n": 17}, "asks for 17 choices"),
        ({"n": "17"}, "asks for 17 choices"),
        ({"n": 17.0}, "asks for 17 choices"),
        ({"n": 9, "prompt": ["a", "b"]}, "asks for 18 choices"),
        ({"n": 9, "prompt": [[1], [2]]}, "asks for 18 choices"),
        ({"n": 9, "prompt": "a", "prompt_embeds": ["AA=="]}, "asks for 18 choices"),
        ({"n": 16, "prompt": [7] * 140_000, "return_token_ids": True}, "repeat the prompt"),
        ({"n": 8, "prompt": ["a" * (2 << 20), "b"], "echo": True}, "repeat the prompt"),
        *[
            ({"n": 16, option: True, "messages": [{"content": text}]}, "repeat the prompt")
            for option, text in (
                ("echo", "a" * (1 << 20)),
                ("return_prompt_text", [{"text": "a" * (1 << 20)}]),
                ("return_token_ids", "a" * (1 << 17)),
            )
        ],
        *[
            ({"repetition_detection": {"max_pattern_size": longest, "min_count": 2}, "n": n}, said)
            for longest, n in ((8000, 1), ("8000", 1), (400, 16))
            for said in ("`repetition_detection`, squared",)
        ],
        ({"questions": [{}] * 100, "input": "a" * 100_000}, "each of its 100 `questions`"),
        (
            {"questions": {key: {} for key in "abcdefghi"}, "state": {"a": ["b" * (1 << 20)]}},
            "each of its 9 `questions`",
        ),
        ({"messages": [[{"role": "user", "content": "x"}]] * 17}, "asks for 17 choices"),
        ({"label_token_ids": [1], "items": ["x"] * 17}, "asks for 17 choices"),
        (
            {"use_beam_search": True, "n": 10, "max_tokens": 4000},
            "`use_beam_search` with this `n` and `max_tokens`",
        ),
        ({"use_beam_search": True, "max_tokens": 0}, "needs `max_tokens` of 1 at least"),
        (
            {"use_beam_search": True, "n": "16", "max_completion_tokens": 300},
            "`use_beam_search` with this `n` and `max_tokens`",
        ),
        (
            {"use_beam_search": True, "n": 16, "max_completion_tokens": 1, "max_tokens": 300},
            "`use_beam_search` with this `n` and `max_tokens`",
        ),
        *[
            ({"use_beam_search": True, "length_penalty": power}, "`length_penalty` is beyond 32")
            for power in (-1e308, "1e3", float("nan"))
        ],
        *[
            (
                {
                    "chat_template_kwargs": {"eos_token": "x" * 900_000},
                    chat: [{"role": "user", "content": "a"}] * 200,
                },
                "each value of the messages",
            )
            for chat in ("messages", "input")
        ],
        ({"label_token_ids": [1] * 8000, "items": ["x"] * 16}, "`label_token_ids` times `items`"),
        *[
            (
                {"prompt": ["a"] * 16, **shared},
                "what the 16 prompts, conversations or documents share",
            )
            for shared in (
                {"stop_token_ids": [1] * 20_000},
                {"logit_bias": {str(number): 1 for number in range(20_000)}},
                {"structured_outputs": {"choice": ["x" * 30] * 6_000}},
                {"structured_outputs": {"grammar": "x" * 300_000}},
            )
        ],
        (
            {"messages": [[{"role": "user"}]] * 16, "tools": [{"type": "x" * 1000}] * 300},
            "what the 16 prompts, conversations or documents share",
        ),
        (
            {"query": "a", "documents": ["b"] * 16, "chat_template_kwargs": {"c": "d" * 300_000}},
            "what the 16 prompts, conversations or documents share",
        ),
    ],
)
def test_what_costs_too_much_is_refused_by_name(body: Any, said: str) -> None:
    with pytest.raises(RequestRejectedError, match=said):
        judge(body, CHOICES)


def test_messages_are_no_text() -> None:
    with pytest.raises(RequestRejectedError, match="`messages` must be a list"):
        judge({"messages": "a" * 8193}, CHOICES)


def test_words_are_forbidden_to_few_choices() -> None:
    judge({"n": 32, "bad_words": ["a"] * 256}, 1024)
    with pytest.raises(RequestRejectedError, match="each of the 33 choices is counted"):
        judge({"n": 33, "bad_words": ["a"] * 256}, 1024)


@pytest.mark.parametrize("name", sorted(RENDERER_OPTIONS))
def test_options_of_the_renderer_are_no_variables_of_a_template(name: str) -> None:
    with pytest.raises(RequestRejectedError, match=f"must not have '{name}'"):
        judge({"chat_template_kwargs": {"enable_thinking": True, name: 1}}, CHOICES)


@pytest.mark.parametrize("name", ["images", "videos", "text", "audio"])
def test_options_of_a_processor_bring_no_media(name: str) -> None:
    with pytest.raises(RequestRejectedError, match=f"must not have '{name}'"):
        judge({"mm_processor_kwargs": {name: ["http://127.0.0.1/"]}}, CHOICES)


PIL: list[dict[str, Any]] = [
    {"type": "image_pil", "image_pil": "http://127.0.0.1/"},
    {"image_pil": "/etc/passwd"},
    {"type": "image_pil", "uuid": "x"},
]


@pytest.mark.parametrize("part", PIL)
@pytest.mark.parametrize("place", ["messages", "tool", "batch", "input", "documents", "data_1"])
def test_no_client_has_a_picture_as_an_object(part: dict[str, Any], place: str) -> None:
    message = {"role": "tool" if place == "tool" else "user", "content": [part]}
    bodies: dict[str, Any] = {
        "messages": {"messages": [message]},
        "tool": {"messages": [message]},
        "batch": {"messages": [[message]]},
        "input": {"input": [message]},
        "documents": {"documents": {"content": [part]}},
        "data_1": {"data_1": [{"content": [part]}]},
    }
    with pytest.raises(RequestRejectedError, match="image_pil"):
        judge(bodies[place], CHOICES)


def test_the_table_has_no_limit_without_a_reason() -> None:
    assert all(limit.why for limit in (*KINDS.values(), UNKNOWN))
    assert set(KINDS.values()) == {FIELDS[name] for name in FIELDS}
    assert INPUTS.values >= MESSAGES.values


def test_a_new_kind_is_shared_by_prompts_or_not() -> None:
    own = {"plain", "text", "messages", "inputs", "results", "chunk"}
    shared = {name for name, limit in KINDS.items() if limit in OF_EACH_PROMPT}
    assert shared == KINDS.keys() - own, "add it to OF_EACH_PROMPT, or to `own` here"


def test_the_page_is_made_from_the_table() -> None:
    assert (Path(__file__).parents[4] / "docs" / "limits.md").read_text() == page(), "make docs"

"""Nothing that changes what is asked is dropped in silence: it is refused, with a remedy."""

from typing import Any, get_args

import httpx
import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock

from frontend.asgi import Door, Receive, Scope, Send, Step
from frontend.gate import BodyGate
from frontend.gate.refused_fields import _OF_RESULTS, _OF_SYSTEM, _TAKEN, RefusedFieldError, check
from frontend.http.limits.admission import Admission
from frontend.http.settings import HttpSettings

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
DATA = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*content]}]}


def result(*content: Any, role: str = "user") -> dict[str, Any]:
    return blocks({"type": "tool_result", "tool_use_id": "t", "content": [*content]}, role=role)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "`tools`"),
    (CHAT, {"function_call": {"name": "f"}}, "function_call", "`tool_choice`"),
    (CHAT, {"audio": {"voice": "alloy"}}, "audio", "leave `audio` out"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", '["text"]'),
    (CHAT, {"web_search_options": {"user_location": None}}, "web_search_options", "the web"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages.0.function_call",
        "`tool_calls`",
    ),
    (
        f"{CHAT}/batch",
        {"messages": [HELLO, [*HELLO, {"role": "assistant", "audio": {"id": "a"}}]]},
        "messages.1.audio",
        "as text",
    ),
    ("/invocations", {"functions": [{}]}, "functions", "`tools`"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation", "whole conversation"),
    (RESPONSES, {"conversation": {"id": "conv_1"}}, "conversation", "store: false"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id", "store: false"),
    (RESPONSES, {"background": True}, "background", "stored"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]}, "input.0", "store: false"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search'"),
    (
        RESPONSES,
        {"tools": [{"type": "function"}, {"type": "code_interpreter"}]},
        "tools.1.type",
        "run it yourself",
    ),
    (
        f"{RESPONSES}/render",
        {"input": [{"role": "assistant", "content": [{"text": "a"}, {"text": "b"}]}]},
        "input.0.content",
        "join",
    ),
    (
        RESPONSES,
        {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
        "input.0.content.0",
        "`output_text`",
    ),
    (MESSAGES, {"mcp_servers": [{"url": "http://x"}]}, "mcp_servers", "`tools`"),
    (MESSAGES, {"container": "c"}, "container", "leave `container` out"),
    (MESSAGES, {"output_format": {"type": "json_schema"}}, "output_format", "output_config.format"),
    (
        MESSAGES,
        {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]},
        "tools.1.type",
        "input_schema",
    ),
    (MESSAGES, {"system": [{"type": "image", "source": DATA}]}, "system.0", "may have text"),
    (MESSAGES, {"system": [{"type": "text"}]}, "system.0", "`text`"),
    (
        f"{MESSAGES}/count_tokens",
        blocks({"type": "image", "source": DATA}, role="system"),
        "messages.0.content.0",
        "system prompt",
    ),
    (MESSAGES, blocks({"type": "image"}), "messages.0.content.0.source", "`source` with `data`"),
    (MESSAGES, blocks({"type": "image", "source": {"type": "url"}}), "", "with `url`"),
    (MESSAGES, blocks({"type": "image", "source": {"type": "file", "file_id": "f"}}), "", "'file'"),
    (MESSAGES, blocks({"type": "image", "source": {"data": 7}}), "", "`data`"),
    (MESSAGES, blocks({"type": "document", "source": DATA}), "", "pages as images"),
    (MESSAGES, blocks({"type": "server_tool_use"}, role="assistant"), "", "'server_tool_use'"),
    (MESSAGES, blocks({"type": ["text"]}), "", "(list)"),
    (MESSAGES, blocks({}), "", "(NoneType)"),
    (MESSAGES, blocks({"type": "x" * 1000}), "", f"'{'x' * 64}'"),
    (MESSAGES, blocks({"type": "text", "text": None}), "", "`text`"),
    (MESSAGES, blocks({"type": "thinking", "thinking": "x"}), "", "role `assistant`"),
    (MESSAGES, blocks({"type": "thinking"}, role="assistant"), "", "`thinking`"),
    (MESSAGES, blocks({"type": "tool_use", "name": "f", "input": {}}), "", "role `assistant`"),
    (MESSAGES, blocks({"type": "tool_reference", "tool_name": "f"}), "", "inside a `tool_result`"),
    (MESSAGES, result({"type": "image"}), "messages.0.content.0.content.0.source", "`data`"),
    (MESSAGES, result({"type": "document"}), "messages.0.content.0.content.0", "a `tool_result`"),
    (MESSAGES, result({"type": "search_result"}), "", "'search_result'"),
    (MESSAGES, result({"type": "tool_reference"}), "", "`tool_name`"),
    (MESSAGES, result({"type": "text", "text": "x"}, role="assistant"), "", "role `user`"),
]


@pytest.mark.parametrize(("path", "body", "field", "said"), REFUSED)
def test_what_would_be_dropped_is_refused(
    path: str, body: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(RefusedFieldError) as refused:
        check(path, body, runs_tools=False)
    assert refused.value.field == field or not field
    assert said in str(refused.value)


TAKEN: list[tuple[str, Any]] = [
    (CHAT, {"messages": HELLO, "functions": [], "function_call": "auto", "audio": None}),
    (CHAT, {"modalities": ["text"], "verbosity": "low", "prediction": {"type": "content"}}),
    (CHAT, {"messages": [{"role": "assistant", "function_call": None, "audio": None}]}),
    (CHAT, {"messages": "text", "tools": 7}),
    (CHAT, ["no object"]),
    (RESPONSES, {"input": "hello", "background": False, "conversation": None, "store": True}),
    (RESPONSES, {"tools": [{"type": "function"}, {"type": "custom"}, {"type": "namespace"}]}),
    (RESPONSES, {"input": [{"role": "assistant", "content": [{"text": "a"}]}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [{}, {}]}]}),
    ("/v1/completions", {"functions": [1], "conversation": "x"}),
    (MESSAGES, {"messages": HELLO, "system": "be brief", "mcp_servers": [], "metadata": {}}),
    (MESSAGES, {"tools": [TOOL, TOOL | {"type": "custom"}]}),
    (MESSAGES, {"system": [{"type": "text", "text": "", "cache_control": {}}]}),
    (MESSAGES, blocks({"type": "image", "source": DATA}, {"type": "text", "text": "?"})),
    (MESSAGES, blocks({"type": "image", "source": {"type": "url", "url": "http://x"}})),
    (MESSAGES, blocks({"type": "image", "source": {"data": "AAAA"}})),
    (MESSAGES, blocks({"type": "redacted_thinking", "data": "x"}, role="assistant")),
    (MESSAGES, blocks({"type": "thinking", "thinking": ""}, role="assistant")),
    (MESSAGES, blocks({"type": "tool_use", "name": "f", "input": {}}, role="assistant")),
    (MESSAGES, result({"type": "text", "text": "x"}, {"type": "image", "source": DATA})),
    (MESSAGES, blocks({"type": "tool_result", "content": "x", "is_error": True})),
    (MESSAGES, blocks({"type": "tool_removal", "tool": {}}, role="system")),
    (MESSAGES, {"messages": [7, {"role": "user", "content": [7, "x", None]}], "system": [7]}),
]


@pytest.mark.parametrize(("path", "body"), TAKEN)
def test_all_else_is_left_to_vllm(path: str, body: Any) -> None:
    check(path, body, runs_tools=False)


def test_what_a_server_can_do_is_not_refused() -> None:
    tools = [{"type": "web_search_preview"}, {"type": "code_interpreter"}, {"type": "mcp"}]
    check(RESPONSES, {"tools": tools}, runs_tools=True)
    with pytest.raises(RefusedFieldError, match="file_search"):
        check(RESPONSES, {"tools": [{"type": "file_search"}]}, runs_tools=True)


def test_every_kind_of_block_was_thought_about() -> None:
    """vLLM has another? Find out what becomes of it in each place."""
    known = get_args(AnthropicContentBlock.model_fields["type"].annotation)
    assert set(known) == _TAKEN
    assert _OF_SYSTEM | _OF_RESULTS <= _TAKEN


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
        ("/v1/messages", {"messages": HELLO, "container": "c"}, "container"),
        ("/invocations", {"messages": HELLO, "audio": {"voice": "x"}}, "audio"),
    ],
)
async def test_the_gate_answers_with_the_words(path: str, body: dict[str, Any], param: str) -> None:
    steps: list[Step] = [Admission(HttpSettings()), BodyGate(max_choices=1)]
    transport = httpx.ASGITransport(Door(unreached, steps, root_path="/behind"))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        reply = await http.post(f"/behind{path}", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "BadRequestError", 400)
    assert f"`{param}`" in error["message"]


async def unreached(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(scope["path"])

"""Conversations for gpt-oss are tokenized off the event loop, and within limits."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from openai_harmony import (  # type: ignore[import-untyped]
    Conversation,
    DeveloperContent,
    Message,
    Role,
    ToolDescription,
)
from vllm.entrypoints.openai.parser import harmony_utils
from vllm.exceptions import VLLMError

from frontend import request_context
from frontend.bounded.forks import Bounds
from frontend.http.server import serving_threads
from frontend.http.server.serving_threads import (
    FEW_BYTES,
    FEW_BYTES_IN_WORDS,
    tokenize_harmony_aside,
    tokens_of_harmony,
)

WORDS = "some words, of which each is short. "


def said(text: str) -> Conversation:
    return Conversation.from_messages([Message.from_role_and_content(Role.USER, text)])


def with_tool(name: str) -> Conversation:
    tool = ToolDescription.new("f", "", {"type": "object", "properties": {name: {}}})
    told = DeveloperContent.new().with_function_tools([tool])
    return Conversation.from_messages([Message.from_role_and_content(Role.DEVELOPER, told)])


def process_of(conversation: Conversation) -> int:
    (process,) = tokens_of_harmony(lambda *_: [os.getpid()], conversation)
    return process


@pytest.mark.parametrize("text", ["a" * 1000, WORDS * 1000, "1234567 " * 1000])
def test_usual_texts_are_tokenized_here(text: str) -> None:
    assert process_of(said(text)) == os.getpid()


@pytest.mark.parametrize(
    "conversation",
    [
        said("a" * FEW_BYTES),
        said(" \n" * FEW_BYTES),
        said("!" + "/\n" * FEW_BYTES),
        said("a\N{COMBINING ACUTE ACCENT}" * FEW_BYTES),
        said("\x1c!" * FEW_BYTES),
        with_tool("a" * FEW_BYTES),
        said(WORDS * (FEW_BYTES_IN_WORDS // len(WORDS) + 1)),
    ],
    ids=["letters", "lines", "slashes", "accents", "controls", "tool", "length"],
)
def test_what_may_take_long_is_tokenized_in_a_process_of_its_own(
    conversation: Conversation,
) -> None:
    assert process_of(conversation) != os.getpid()


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = Bounds(cpu_s=1, memory_bytes=1 << 30, alarm_s=20)
    monkeypatch.setattr(serving_threads, "BOUNDS", bounds)

    def endless(conversation: Conversation) -> list[int]:
        while conversation.messages:
            pass
        return []

    with pytest.raises(VLLMError, match="more than 1 s of a core to be tokenized"):
        tokens_of_harmony(endless, said("a" * FEW_BYTES))


@pytest.mark.parametrize("name", ["render_chat", "render_responses"])
async def test_the_event_loop_goes_on_meanwhile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = SimpleNamespace(render_conversation_for_completion=lambda _: [])
    monkeypatch.setattr(harmony_utils, "get_encoding", lambda: encoding)

    async def render(*args: Any, **options: Any) -> Any:
        return threading.get_ident(), args, options

    app = FastAPI()
    app.state.online_renderer = SimpleNamespace(
        use_harmony=True, render_chat=render, render_responses=render
    )
    tokenize_harmony_aside(app)
    request_context.begin()
    thread, *given = await getattr(app.state.online_renderer, name)(1, skip_mm_cache=True)
    assert thread != threading.get_ident()
    assert given == [(1,), {"skip_mm_cache": True}]

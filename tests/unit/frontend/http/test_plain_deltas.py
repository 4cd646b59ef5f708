"""Streams whose text no parser looks at say the same as vLLM's, and all others are left alone."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.parser_manager import ParserManager
from vllm.tool_parsers import ToolParserManager

from common.vllm_compat.features import makers_of_messages
from frontend.http.streaming import plain_deltas
from frontend.http.streaming.stream_chunks import quick_message

PIECES = ["", "a", " b", "<", "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]
PIECES += ['{"name": "f", ', '"arguments": {}}', "\n\n", "<|python_tag|>", "é", "[", "]"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "hi"}]


class _Vocabulary(dict[str, int]):
    """Has every token."""

    def __missing__(self, token: str) -> int:
        return self.setdefault(token, len(self))

    def __contains__(self, token: object) -> bool:
        return True

    def get(self, token: str, default: Any = None) -> int:
        return self[token]


class _Tokenizer:
    """As much as parsers ask for."""

    def __init__(self) -> None:
        self.vocabulary = _Vocabulary()
        self.all_special_tokens: list[str] = []
        self.all_special_ids: list[int] = []
        self.added_tokens_encoder = self.vocabulary

    def get_vocab(self) -> _Vocabulary:
        return self.vocabulary

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.vocabulary[text]]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        texts = {number: text for text, number in self.vocabulary.items()}
        return "".join(texts[number] for number in token_ids)


def _parser(tools: str | None, reasoning: str | None = None) -> Any:
    kind: Any = ParserManager.get_parser(tools, reasoning, enable_auto_tools=True)
    return kind(_Tokenizer(), None)


def _works(name: str) -> bool:
    """Whether a parser can do with such a tokenizer."""
    try:
        _stream(_parser(name), _chat(tool_choice="none"), random.Random(0))
    except Exception:  # noqa: BLE001  # each fails in its own way
        return False
    return True


def _chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"model": "demo", "messages": MESSAGES, "stream": True} | fields
    )


def _stream(parser: Any, request: Any, chance: random.Random) -> list[str | None]:
    said: list[str | None] = []
    prompt = [1, 2] if chance.random() < 0.9 else None
    count = chance.randrange(1, 12)
    for place in range(count):
        texts = chance.choices(PIECES, k=chance.choice([0, 1, 1, 1, 3]))
        tokens = [parser.model_tokenizer.vocabulary[text] for text in texts]
        # vLLM names the prompt with each output, or, with embeddings, never.
        message = parser.parse_delta(
            "".join(texts), tokens, request, prompt, finished=place == count - 1
        )
        said.append(message and message.model_dump_json(exclude_unset=True))
    return said


def _outcome(parser: Any, request: Any, chance: random.Random) -> list[str | None]:
    try:
        said = _stream(parser, request, chance)
    except Exception as error:  # noqa: BLE001  # a parser that such text is too odd for
        said = [repr(error)]
    return [one and re.sub(r'"id":"[^"]*"', '"id":"random"', one) for one in said]


REQUESTS: dict[str, Callable[[], Any]] = {
    "no tools": _chat,
    "no tools, without reasoning": lambda: _chat(include_reasoning=False),
    "tools that are not to be called": lambda: _chat(tools=[TOOL], tool_choice="none"),
    "tools": lambda: _chat(tools=[TOOL]),
    "a response": lambda: ResponsesRequest(input="hi", tool_choice="none"),
}


@pytest.fixture
def parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[bool], None]:
    """Has streams parsed by vLLM or by us."""

    def switch(ours: bool) -> None:
        monkeypatch.setattr(DelegatingParser, "parse_delta", plain_deltas._parse)
        for module in makers_of_messages():
            monkeypatch.setattr(module, "DeltaMessage", quick_message if ours else DeltaMessage)
        if ours:
            plain_deltas.install()

    return switch


def test_most_parsers_can_be_compared() -> None:
    names = ToolParserManager.list_registered()
    assert sum(map(_works, names)) > len(names) / 2


@pytest.mark.parametrize("asked", REQUESTS)
def test_streams_say_the_same(parsed: Callable[[bool], None], asked: str) -> None:
    parsed(False)
    names = [name for name in ToolParserManager.list_registered() if _works(name)]
    for name in names:
        for seed in range(20):
            said = []
            for ours in (False, True):
                parsed(ours)
                said.append(_outcome(_parser(name), REQUESTS[asked](), random.Random(seed)))
            assert said[0] == said[1], (name, seed)


@pytest.mark.parametrize("reasoning", ["deepseek_r1", "qwen3"])
def test_streams_with_reasoning_say_the_same(
    parsed: Callable[[bool], None], reasoning: str
) -> None:
    for seed in range(40):
        said = []
        for ours in (False, True):
            parsed(ours)
            said.append(_stream(_parser("hermes", reasoning), _chat(), random.Random(seed)))
        assert said[0] == said[1], seed


def test_vllm_is_asked_for_the_first_and_the_last_only(
    parsed: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed(True)
    asked: list[str] = []
    vllms: Any = plain_deltas._parse

    def parse(parser: Any, text: str, *args: Any, **options: Any) -> Any:
        asked.append(text)
        return vllms(parser, text, *args, **options)

    monkeypatch.setattr(plain_deltas, "_parse", parse)
    parser, request = _parser("hermes"), _chat()
    texts = ["a", "b", "", "c", "d"]
    said = [parser.parse_delta(text, [1], request, [1], finished=text == "d") for text in texts]
    assert asked == ["a", "d"]
    assert [message and message.content for message in said] == ["a", "b", None, "c", "d"]


def test_parsers_of_single_models_are_left_alone(parsed: Callable[[bool], None]) -> None:
    parsed(True)

    class Own(DelegatingParser):
        tool_parser_cls = ToolParserManager.get_tool_parser("hermes")

        def _extract_tool_calls_streaming(self, *_: Any, **__: Any) -> Any:
            return None, False

    parser: Any = Own(_Tokenizer(), None)
    said = [parser.parse_delta("a", [1], _chat(), [1], finished=False) for _ in range(3)]
    assert said == [None, None, None]

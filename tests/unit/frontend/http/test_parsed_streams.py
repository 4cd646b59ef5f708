"""A parser that takes text as it is makes nothing else of it, also if it is not asked."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from frontend.http.streaming.token_streams import skipping, takes_text_as_it_is

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


def _parser(tools: str | None, reasoning: str | None = None, *, skips: bool = False) -> Any:
    """
    Args:
        skips: what needs no parsing.
    """
    kind: Any = ParserManager.get_parser(tools, reasoning, enable_auto_tools=True)
    return (skipping(kind) if skips else kind)(_Tokenizer(), None)


def _works(tools: str | None, reasoning: str | None = None) -> bool:
    """Whether parsers can do with such a tokenizer."""
    try:
        _stream(_parser(tools, reasoning), _chat(tool_choice="none"), random.Random(0))
    except Exception:  # noqa: BLE001  # each fails in its own way
        return False
    return True


def _chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"model": "demo", "messages": MESSAGES, "stream": True} | fields
    )


def _stream(parser: Any, request: Any, chance: random.Random) -> list[str | None]:
    """The messages of a stream."""
    said: list[str | None] = []
    prompt = [1, 2] if chance.random() < 0.9 else None
    count = chance.randrange(1, 12)
    for place in range(count):
        texts = chance.choices(PIECES, k=chance.choice([0, 1, 1, 1, 3]))
        tokens = [parser.model_tokenizer.vocabulary[text] for text in texts]
        text, finished = "".join(texts), place == count - 1
        # vLLM names the prompt with each output, or, with embeddings, never.
        message = parser.parse_delta(text, tokens, request, prompt, finished=finished)
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


def test_most_parsers_can_be_compared() -> None:
    names = ToolParserManager.list_registered()
    assert sum(map(_works, names)) > len(names) / 2


@pytest.mark.parametrize("asked", REQUESTS)
def test_streams_say_the_same(asked: str) -> None:
    names = [name for name in ToolParserManager.list_registered() if _works(name)]
    for name in names:
        for seed in range(20):
            theirs, ours = (
                _outcome(_parser(name, skips=skips), REQUESTS[asked](), random.Random(seed))
                for skips in (False, True)
            )
            assert ours == theirs, (name, seed)


@pytest.mark.parametrize("tools", [None, "hermes", "qwen3_coder"])
@pytest.mark.parametrize("asked", [name for name in REQUESTS if name != "a response"])
def test_streams_with_reasoning_say_the_same(tools: str | None, asked: str) -> None:
    compared = 0
    names = ReasoningParserManager.list_registered()
    for name in (name for name in names if _works(tools, name)):
        for seed in range(20):
            theirs, ours = (
                _outcome(_parser(tools, name, skips=skips), REQUESTS[asked](), random.Random(seed))
                for skips in (False, True)
            )
            assert ours == theirs, (name, seed)
            compared += len(theirs) > 1
    assert compared > 200


def test_the_first_text_tells() -> None:
    parser, request = _parser("hermes", skips=True), _chat()
    assert not takes_text_as_it_is(parser, request)
    parser.parse_delta("a", [1], request, [1], finished=False)
    assert takes_text_as_it_is(parser, request)
    parser.parse_delta("b", [2], request, [1], finished=False)
    assert "b" not in parser._stream_state.previous_text


@pytest.mark.parametrize(
    "request_", [_chat(tools=[TOOL]), _chat(include_reasoning=False)], ids=["tools", "hidden"]
)
def test_what_may_become_something_else_is_parsed(request_: ChatCompletionRequest) -> None:
    parser = _parser("hermes", skips=True)
    for _ in range(3):
        parser.parse_delta("a", [1], request_, [1], finished=False)
        assert not takes_text_as_it_is(parser, request_)


def test_parsers_of_single_models_are_left_alone() -> None:
    class Own(DelegatingParser):
        tool_parser_cls = ToolParserManager.get_tool_parser("hermes")

        def _extract_tool_calls_streaming(self, *_: Any, **__: Any) -> Any:
            return None, False

    assert skipping(Own) is Own
    parser: Any = Own(_Tokenizer(), None)
    for _ in range(3):
        parser.parse_delta("a", [1], _chat(), [1], finished=False)
        assert not takes_text_as_it_is(parser, _chat())

"""Streams made with what takes the place of vLLM's models have the same bytes."""

import re
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    RequestResponseMetadata,
)
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from common.vllm_compat.features import makers_of_messages
from frontend.http.streaming import stream_chunks
from frontend.http.streaming.stream_chunks import (
    STANDS_FOR,
    ChatChoice,
    ChatChunk,
    Delta,
    as_vllms,
    quick_message,
)
from tests.by_version import since_033

NAMES = [(module, STANDS_FOR[ours].__name__) for ours, module in stream_chunks._MADE_IN.items()]
NAMES += [(module, "DeltaMessage") for module in makers_of_messages()]

NEWER = since_033(set[str](), {"weight_versions", "kv_transfer_params"})
"""Fields that the models of the vLLM here have not."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Has streams made by vLLM's models or by ours; afterwards by whichever did it before."""
    for module, name in NAMES:
        monkeypatch.setattr(module, name, vars(module)[name])
    for module in (chat_serving, completion_serving):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 7.0))

    def switch(ours: bool) -> None:
        for module, name in NAMES:
            theirs = next(model for model in STANDS_FOR.values() if model.__name__ == name)
            vars(module)[name] = theirs
        if ours:
            stream_chunks.install()

    return switch


@pytest.mark.parametrize("ours", STANDS_FOR)
def test_each_has_the_fields_of_the_one_it_stands_for(ours: type[msgspec.Struct]) -> None:
    fields = [name for name in ours.__struct_fields__ if name not in NEWER]
    assert fields == [*STANDS_FOR[ours].model_fields]


LETTERS = [chr(code) for code in range(0x300)] + ["\u2028", "\ufeff", "\uffff", "🙂", "</script>"]


@given(
    st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(LETTERS),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    st.none() | st.text(max_size=3).filter(lambda text: text.isprintable()),
)
def test_any_text_is_written_as_pydantic_writes_it(
    text: str, name: str, reason: str | None
) -> None:
    chunk = ChatChunk(
        id=name,
        object="chat.completion.chunk",
        created=1 << 33,
        model=name,
        choices=[
            ChatChoice(index=0, delta=delta, logprobs=None, finish_reason=reason, token_ids=None)
            for delta in (Delta(content=text), DeltaMessage(content=text))
        ],
    )
    theirs: Any = as_vllms(chunk)
    assert type(theirs.choices[0].delta) is DeltaMessage
    assert type(theirs) is STANDS_FOR[ChatChunk]
    assert chunk.model_dump_json(exclude_unset=True) == theirs.model_dump_json(exclude_unset=True)
    assert chunk.model_dump_json() == theirs.model_dump_json()


@pytest.mark.parametrize("fields", [{"content": "a"}, {"content": ""}, {"reasoning": "a"}, {}])
def test_a_parsers_message_is_as_its_constructor_makes_it(fields: dict[str, Any]) -> None:
    ours, theirs = quick_message(**fields), DeltaMessage(**fields)
    for message in (ours, theirs):
        assert message == DeltaMessage(**fields)
    assert type(ours) is DeltaMessage and vars(ours) == vars(theirs)
    assert list(vars(ours)) == list(vars(theirs))
    for exact in (True, False):
        json = theirs.model_dump_json(exclude_unset=exact)
        assert ours.model_dump_json(exclude_unset=exact) == json
    assert ours.model_fields_set == theirs.model_fields_set
    assert ours.model_extra == theirs.model_extra
    assert ours.model_copy(deep=True) == theirs
    for message in (ours, theirs):
        message.content = None
        message.tool_calls.append(_call(0))
    assert ours.model_dump_json(exclude_unset=True) == theirs.model_dump_json(exclude_unset=True)
    assert not quick_message(content="b").tool_calls


def test_what_is_no_part_of_an_event_is_refused() -> None:
    chunk = ChatChunk(id="", object="", created=0, model="", choices=[object()])
    with pytest.raises(TypeError, match="no part of an event"):
        chunk.model_dump_json(exclude_unset=True)


def _answers(n: int) -> list[RequestOutput]:
    texts = ["one", "", ' "two"\n', "…three\x7f"]

    def output(place: int, index: int) -> CompletionOutput:
        last = place == len(texts) - 1
        logprobs: Any = [
            {place: Logprob(-0.1 * place - 1e-7, 1, texts[place]), 9: Logprob(-9.5e9, 2, "9")}
        ]
        return CompletionOutput(
            index,
            texts[place],
            [place],
            -0.5,
            logprobs,
            finish_reason="stop" if last else None,
            stop_reason="three" if last and not index else None,
        )

    return [
        RequestOutput(
            "r",
            "prompt",
            [1, 2],
            None,
            [output(place, index) for index in range(n)],
            place == len(texts) - 1,
            num_cached_tokens=1,
        )
        for place in range(len(texts))
    ]


def _call(index: int, **fields: Any) -> DeltaToolCall:
    function = DeltaFunctionCall(name="f", arguments='{"a": "b"}')
    return DeltaToolCall(index=index, function=function, **fields)


DELTAS: list[list[DeltaMessage | None]] = [
    [DeltaMessage(content="a"), DeltaMessage(content=""), None, DeltaMessage(content="b")],
    [DeltaMessage(reasoning="a"), DeltaMessage(reasoning="b", content="c"), None, None],
    [
        DeltaMessage(tool_calls=[_call(0, id="x", type="function"), _call(1)]),
        DeltaMessage(content="a", tool_calls=[]),
        DeltaMessage(content=None),
        DeltaMessage(tool_calls=[_call(0)]),
    ],
    [DeltaMessage.model_validate({"content": "a", "citations": ["odd"]}), None, None, None],
]


class _Parser:
    tool_parser_cls = object

    def __init__(self, deltas: list[DeltaMessage | None]) -> None:
        self._deltas = [delta and delta.model_copy(deep=True) for delta in deltas]

    def parse_delta(self, **_: Any) -> DeltaMessage | None:
        return self._deltas.pop(0)

    def count_reasoning_tokens(self, token_ids: object) -> int:
        return 3


def _serving(kind: Any, deltas: list[DeltaMessage | None] | None = None) -> Any:
    serving = kind.__new__(kind)
    vars(serving).update(
        parser_cls=None if deltas is None else _Parser,
        _make_parser=lambda *_: _Parser(deltas or []),
        enable_auto_tools=True,
        enable_force_include_usage=False,
        enable_prompt_tokens_details=True,
        enable_per_request_metrics=False,
        enable_log_outputs=False,
        request_logger=None,
        response_role="assistant",
        system_fingerprint="fingerprint",
        return_tokens_as_token_ids=False,
        _include_reasoning_tokens_details=deltas is not None,
    )
    return serving


async def _outputs(n: int, error: Exception | None = None) -> AsyncGenerator[RequestOutput]:
    """All of an answer, or the beginning of it and an error."""
    for output in _answers(n)[: 2 if error else None]:
        yield output
    if error is not None:
        raise error


USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
KINDS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"return_token_ids": True},
    {"echo": True},
    USAGE,
    {"stream_options": {"include_usage": True}},
    {"n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True} | USAGE,
]


SIGNATURE = re.compile(r"\b[0-9a-f]{32}\b")


def _stream(
    serving: Any, kind: dict[str, Any], error: Exception | None = None
) -> AsyncGenerator[str]:
    request = ChatCompletionRequest(
        model="demo", stream=True, messages=[{"role": "user", "content": "hi"}], **kind
    )
    stream: AsyncGenerator[str] = serving.chat_completion_stream_generator(
        request,
        _outputs(request.n or 1, error),
        "id-1",
        "demo",
        [{"role": "assistant", "content": "before"}],
        SimpleNamespace(),
        RequestResponseMetadata(request_id="id-1"),
    )
    return stream


async def _chat(
    kind: dict[str, Any],
    deltas: list[DeltaMessage | None] | None,
    error: Exception | None = None,
) -> list[str]:
    serving = _serving(chat_serving.OpenAIServingChat, deltas)
    return [event async for event in _stream(serving, kind, error)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("deltas", [None, *DELTAS], ids=range(len(DELTAS) + 1))
@pytest.mark.parametrize("parallel", [True, False])
async def test_a_chat_is_streamed_with_the_same_bytes(
    installed: Callable[[bool], None],
    kind: dict[str, Any],
    deltas: list[DeltaMessage | None] | None,
    parallel: bool,
) -> None:
    streams = []
    for ours in (False, True):
        installed(ours)
        streams.append(await _chat(kind | {"parallel_tool_calls": parallel}, deltas))
    theirs, mine = streams
    assert mine == theirs
    assert len(theirs) > 3 and "error" not in "".join(theirs)


async def _message(deltas: list[DeltaMessage | None] | None) -> list[str]:
    """The stream of a chat as Anthropic's API has it."""
    serving = _serving(AnthropicServingMessages, deltas)
    # Up to vLLM 0.32 its route has the bytes of a chat translated.
    translated = since_033(lambda stream: stream, serving.message_stream_converter)
    events = translated(_stream(serving, USAGE))
    return [SIGNATURE.sub("", event) async for event in events]


@pytest.mark.parametrize("deltas", [None, *DELTAS], ids=range(len(DELTAS) + 1))
async def test_a_message_of_anthropics_is_streamed_with_the_same_bytes(
    installed: Callable[[bool], None], deltas: list[DeltaMessage | None] | None
) -> None:
    streams = []
    for ours in (False, True):
        installed(ours)
        streams.append(await _message(deltas))
    theirs, mine = streams
    assert mine == theirs
    assert len(theirs) > 3 and "error" not in "".join(theirs)


async def _completion(kind: dict[str, Any], error: Exception | None = None) -> list[str]:
    request = CompletionRequest(model="demo", stream=True, prompt="hi", max_tokens=9, **kind)

    async def numbered() -> AsyncGenerator[tuple[int, RequestOutput]]:
        async for output in _outputs(request.n or 1, error):
            yield 0, output

    serving = _serving(completion_serving.OpenAIServingCompletion)
    stream = serving.completion_stream_generator(
        request,
        [{"type": "token", "prompt_token_ids": [1, 2]}],
        numbered(),
        "id-1",
        7,
        "demo",
        num_prompts=1,
        tokenizer=None,
        request_metadata=RequestResponseMetadata(request_id="id-1"),
    )
    return [event async for event in stream]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "top_logprobs" not in kind] + [{"logprobs": 1}], ids=str
)
async def test_a_completion_is_streamed_with_the_same_bytes(
    installed: Callable[[bool], None], kind: dict[str, Any]
) -> None:
    streams = []
    for ours in (False, True):
        installed(ours)
        streams.append(await _completion(kind))
    theirs, mine = streams
    assert mine == theirs
    assert len(theirs) > 3 and "error" not in "".join(theirs)


ERRORS = [
    GenerationError("the engine failed"),
    GracefulHTTPError("all workers are gone", HTTPStatus.SERVICE_UNAVAILABLE),
    VLLMValidationError("too long", parameter="prompt"),
    RuntimeError("„odd“\n"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", [{}, USAGE], ids=str)
async def test_a_stream_that_fails_ends_with_the_same_bytes(
    installed: Callable[[bool], None], kind: dict[str, Any], error: Exception
) -> None:
    streams: list[list[str]] = []
    for ours in (False, True):
        installed(ours)
        streams.append([*await _chat(kind, None, error), *await _completion(kind, error)])
    theirs, mine = streams
    assert mine == theirs
    assert sum('"error"' in event for event in theirs) == 2

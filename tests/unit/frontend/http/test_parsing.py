"""Parsers of answers leave the event loop to others, on each route that parses."""

import asyncio
import itertools
import json
import re
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
)
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.reasoning.muse_glimmer_reasoning_parser import MuseGlimmerReasoningParser
from vllm.renderers.online_derenderer import OnlineDerenderer

from frontend import request_context
from frontend.bounded.forks import Bounds
from frontend.http.streaming import parsing
from frontend.http.streaming.parsing import (
    DERENDERED_S,
    DERENDERING,
    FEW,
    FORKED_TOKENS,
    LONG_OUTPUT_TEXT,
    LONG_PROMPT,
    LONG_S,
    LONG_TEXT,
    SLOW_S,
    ParsesAside,
    RequestParsing,
    aside,
    derender_aside,
    paced,
    these,
    timed,
)
from frontend.http.streaming.stream_errors import Messages, Responses, _answer_of, say_errors
from frontend.http.streaming.token_streams import Batches, Chats

TIMEOUT_S = 30.0


class Slow(Parser):
    """A parser that an answer keeps busy, or takes what time it is told."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def parse_delta(self, *args: Any, **options: Any) -> None:
        self.threads.append(threading.get_ident())


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long streams waited; no time passes while they do."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    clock = SimpleNamespace(monotonic=lambda: 100.0, thread_time=lambda: 0.0)
    monkeypatch.setattr(parsing, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(parsing, "time", clock)
    monkeypatch.setattr(parsing, "_pace", parsing._Pace())
    return waited


async def read(costs: list[float]) -> list[int]:
    """Read a stream whose outputs cost its parsers some time."""
    seen: list[int] = []
    async for output in paced(None, these(*range(len(costs))), lambda _: None):
        spent = request_context.current_context().find(RequestParsing)
        assert spent is not None
        spent.seconds += costs[output]
        seen.append(output)
    return seen


async def test_a_usual_stream_waits_for_nothing(waits: list[float]) -> None:
    request_context.begin()
    assert await read([0.001] * 5) == [0, 1, 2, 3, 4]
    assert not waits


async def test_a_stream_waits_as_long_as_it_took(waits: list[float]) -> None:
    request_context.begin()
    assert await read([0.5, 0.0, 0.25]) == [0, 1, 2]
    assert waits == pytest.approx([0.5, 0.75])  # behind itself, since no time passed


async def test_many_streams_have_no_more_than_one(waits: list[float]) -> None:
    for _ in range(3):
        request_context.begin()
        await read([1.0])
    assert waits == pytest.approx([1.0, 2.0, 3.0])


async def test_time_is_noted_of_each_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.5])
    monkeypatch.setattr(parsing, "time", SimpleNamespace(thread_time=lambda: next(times)))
    context = request_context.begin()
    spent = RequestParsing()
    context.put(spent)
    timed(Slow)().parse_delta("text", [1], None, finished=False)
    assert spent.seconds == 2.5


def output(text: str, *, index: int = 0, finish_reason: str | None = None) -> RequestOutput:
    part = CompletionOutput(index, text, [1], None, None, finish_reason=finish_reason)
    return RequestOutput("id", None, [7], None, [part], finish_reason is not None)


class Threads(Parser):
    """A parser that notes what it parses, and whether in a thread for answers."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seen: list[tuple[str, bool]] = []

    def parse_delta(self, delta_text: str, *args: Any, **options: Any) -> DeltaMessage:
        aside = threading.current_thread().name.startswith("answers")
        self.seen.append((delta_text, aside))
        return DeltaMessage(content=delta_text.upper())


LONG = "long " * 40


@pytest.mark.parametrize("slow", [False, True])
async def test_long_outputs_and_those_after_slow_ones_are_parsed_in_a_thread(
    slow: bool,
) -> None:
    """1.2 KB that a model wrote at once, or a client read at once, stopped the loop for 8 s."""
    context = request_context.begin()
    parser: Any = timed(Threads)()
    texts = ["first", LONG, "last"]
    outputs = paced(None, these(*map(output, texts)), lambda each: each, parser)
    spent = context.find(RequestParsing)
    assert spent is not None
    made = []
    async for each in outputs:
        made.append(
            parser.parse_delta(each.outputs[0].text, [1], None, [7], finished=False).content
        )
        if slow:
            spent.seconds += SLOW_S * 2
    assert made == [text.upper() for text in texts]  # each once
    assert parser.seen == [("first", False), (LONG, True), ("last", slow)]


def outputs_of_two() -> list[RequestOutput]:
    texts = [("a" + LONG, 0), ("b" + LONG, 1), ("c", 0)]
    made = [output(text, index=index) for text, index in texts]
    return [*made, *(output(LONG, index=index, finish_reason="stop") for index in (0, 1))]


async def test_vllms_chats_ask_for_what_was_parsed() -> None:
    request_context.begin()
    parsers: list[Any] = []

    def make(*_: Any, **__: Any) -> Any:
        parsers.append(timed(Threads)())
        return parsers[-1]

    chat = serving(
        ParsesAside,
        parser_cls=make,
        enable_auto_tools=False,
        model_config=None,
        response_role="assistant",
        enable_force_include_usage=False,
        enable_log_outputs=False,
        request_logger=None,
        _include_reasoning_tokens_details=False,
        system_fingerprint=None,
    )
    request = ChatCompletionRequest(model="m", n=2, messages=[{"role": "user", "content": "hi"}])
    said: dict[int, str] = {0: "", 1: ""}
    async for event in chat.chat_completion_stream_generator(
        request, these(*outputs_of_two()), "id", "m", [], object(), SimpleNamespace()
    ):
        if event != "data: [DONE]\n\n":
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                said[choice["index"]] += choice["delta"]["content"]
    assert said == {0: f"A{LONG}C{LONG}".upper(), 1: f"B{LONG}{LONG}".upper()}
    seen = [[(text[0], aside) for text, aside in parser.seen] for parser in parsers]
    assert seen == [[("a", True), ("c", False), ("l", True)], [("b", True), ("l", True)]]


async def test_vllms_responses_ask_for_what_was_parsed() -> None:
    request_context.begin()
    context = SimpleContext(response_parser=timed(Threads)())

    async def contexts() -> AsyncGenerator[SimpleContext]:
        for text, reason in [("a" + LONG, None), ("b", None), (LONG, "stop")]:
            context.append_output(output(text, finish_reason=reason))
            yield context

    asked = ResponsesRequest(input="hi")
    made = serving(Responses, enable_store=False)
    events = made._process_simple_streaming_events
    outputs = paced(asked, contexts(), _answer_of, context.response_parser)
    said = [
        event.delta
        async for event in events(
            asked, None, outputs, context, "m", None, None, 0, lambda event: event
        )
        if event.type == "response.output_text.delta"
    ]
    assert "".join(said) == f"A{LONG}B{LONG}".upper()
    seen = [(text[0], aside) for text, aside in context.response_parser.seen]
    assert seen == [("a", True), ("b", False), ("l", True)]


def test_coheres_chats_are_parsed_aside() -> None:
    """vLLM's class can't be imported without Cohere's package."""
    chats = OpenAIServingChat.__new__(type("CohereServingChatV2", (OpenAIServingChat,), {}))
    chats.parser_cls = Threads
    app = FastAPI()
    app.state.cohere_serving_chat_v2 = chats
    say_errors(app)
    made: Any = app.state.cohere_serving_chat_v2
    assert {ParsesAside, type(chats)} < {*type(made).mro()}
    assert made.parser_cls is not Threads and issubclass(made.parser_cls, Threads)


async def test_another_text_than_was_parsed_is_an_error() -> None:
    parser: Any = timed(Threads)()
    parser.parse_ahead("a")
    with pytest.raises(RuntimeError, match="parses other outputs"):
        parser.parse_delta("b")


async def test_what_a_parser_of_a_stream_never_ends_with_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that a client let pile up, say."""

    class Endless(Idle):
        def parse_delta(self, *args: Any, **options: Any) -> None:
            while True:
                pass

    monkeypatch.setattr(parsing, "BOUNDS", Bounds(1, 1 << 30, 60))
    request_context.begin()
    outputs = these(output("x" * (LONG_OUTPUT_TEXT + 1)))
    with pytest.raises(VLLMValidationError, match="takes too long to be parsed"):
        await anext(paced(None, outputs, lambda each: each, timed(Endless)()))


class Muse(MuseGlimmerReasoningParser):
    """Has a token for each character."""

    def __init__(self) -> None:
        self.model_tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))


class ReadsPrompts(Parser):
    """A parser with one that reads a prompt's text."""

    reasoning_parser_cls = Muse

    def __init__(self, *_: Any, **__: Any) -> None:
        """Needs no tokenizer."""

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return Muse().is_reasoning_end(input_ids)


ENDED = list(map(ord, "to=f<|message|><atem:function_calls>" + " " * LONG_PROMPT))


@pytest.mark.parametrize("kind", [Chats, Messages, Batches])
async def test_a_parser_reads_a_long_prompt_once_and_not_on_the_loop(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked, threads = parsing.forked, list[int]()

    def noting(*args: Any) -> bytes:
        threads.append(threading.get_ident())
        return forked(*args)

    async def rendered(self: object, request: Any) -> Any:
        return ([request], [None], [ENDED]) if kind is Batches else ([None], [ENDED])

    of, name = OpenAIServingChat, "render_chat_request"
    if kind is Batches:
        of, name = OpenAIServingChatBatch, "render_batch_chat_request"
    monkeypatch.setattr(of, name, rendered)
    monkeypatch.setattr(parsing, "forked", noting)
    request_context.begin()
    parser: Any = timed(ReadsPrompts)
    chat = serving(
        kind,
        parser_cls=parser,
        model_config=None,
        renderer=SimpleNamespace(tokenizer=None),
        _effective_chat_template_kwargs=lambda _: {},
        _extract_prompt_components=lambda prompt: SimpleNamespace(token_ids=prompt),
    )
    await getattr(chat, name)(SimpleNamespace(tools=None))
    assert parser().is_reasoning_end([*ENDED])
    (thread,) = threads
    assert thread != threading.get_ident()


async def test_a_prompt_that_is_read_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """192 KB of it took a parser 54 s of the event loop, for any client."""
    monkeypatch.setattr(parsing, "BOUNDS", Bounds(1, 1 << 30, 60))
    request_context.begin()
    parser: Any = timed(ReadsPrompts)()
    with pytest.raises(VLLMValidationError, match="takes too long to be parsed"):
        parser.is_reasoning_end(list(map(ord, "to=" * 40_000)))


def parse(parser: Any, outputs: int) -> None:
    for _ in range(outputs):
        parser.parse_delta("text", [1], None, finished=False)


def test_a_stream_that_takes_ever_longer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=1.1 * LONG_S)
    monkeypatch.setattr(parsing, "time", SimpleNamespace(thread_time=lambda: next(now)))
    parser: Any = timed(Slow)()
    parse(parser, FEW)
    with pytest.raises(VLLMValidationError, match="takes too long to be parsed"):
        parse(parser, 1)


def test_a_stream_that_takes_very_long_at_once_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = itertools.count(step=(FEW + 1) * LONG_S)
    monkeypatch.setattr(parsing, "time", SimpleNamespace(thread_time=lambda: next(now)))
    parser: Any = timed(Slow)()
    parse(parser, 1)
    with pytest.raises(VLLMValidationError, match="takes too long to be parsed"):
        parse(parser, 1)


def test_a_pause_now_and_then_is_no_fault_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(thread_time=lambda: 0.0)
    monkeypatch.setattr(parsing, "time", clock)
    parser: Any = timed(Slow)()
    for _ in range(10):
        parse(parser, 120)
        pauses = iter([0.0, 2 * LONG_S])
        clock.thread_time = lambda pauses=pauses: next(pauses)
        parse(parser, 1)
        clock.thread_time = lambda: 0.0


@pytest.mark.parametrize("tools", ["hermes", "pythonic", "mistral"])
def test_vllms_parsers_are_timed(tools: str) -> None:
    kind = ParserManager.get_parser(tool_parser_name=tools, enable_auto_tools=True)
    assert kind is not None
    made = timed(kind)
    assert made.parse_delta is not kind.parse_delta
    assert made.tool_parser_cls is kind.tool_parser_cls


class Whole(Parser):
    """A parser of whole answers, which some keep busy without end."""

    def __init__(self) -> None:
        self.begun = False

    def parse(self, model_output: str, *args: Any, **options: Any) -> Any:
        self.begun = True
        while model_output.startswith("endless"):
            pass
        if model_output.startswith("wrong"):
            raise ValueError(model_output)
        return model_output[:4], None, [FunctionCall(name="f", arguments="{}")]


async def test_a_long_answer_is_parsed_in_a_process_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parser: Any = timed(Whole)()
    found = ("good", None, [FunctionCall(name="f", arguments="{}")])
    assert parser.parse("good") == found and parser.begun
    parser.begun = False
    assert parser.parse("good" * LONG_TEXT) == found and not parser.begun
    monkeypatch.setattr(parsing, "BOUNDS", Bounds(cpu_s=1, memory_bytes=1 << 30, alarm_s=20))
    for text in ("endless", "wrong"):
        with pytest.raises(VLLMValidationError, match="takes too long to be parsed"):
            parser.parse(text * LONG_TEXT)


class Halves(Parser):
    """A parser that reads escapes as JSON has them."""

    def __init__(self) -> None:
        pass

    def parse(self, model_output: str, *args: Any, **options: Any) -> Any:
        return None, None, [FunctionCall(name="f", arguments='{"a":"\ud83d"}')]

    def parse_delta(self, *args: Any, **options: Any) -> DeltaMessage:
        function = DeltaFunctionCall(name="f", arguments='{"a":"\ud83d')
        return DeltaMessage(tool_calls=[DeltaToolCall(index=0, function=function)])


def test_a_call_with_half_of_a_character_can_be_sent() -> None:
    parser: Any = timed(Halves)()
    (call,) = parser.parse("text")[2]
    delta = parser.parse_delta("text", [1], None, finished=False)
    assert call.arguments == r'{"a":"\ud83d"}'
    assert delta.tool_calls[0].function.arguments == r'{"a":"\ud83d'


class Searches(Parser):
    """A parser that searches a whole answer as that of dots does, or goes down into it."""

    def __init__(self) -> None:
        pass

    def parse(self, model_output: str, *args: Any, **options: Any) -> Any:
        if model_output.startswith("["):
            return self.parse(model_output, *args, **options)
        found = re.findall(r"<call>\s*(.*?)\s*</call>", model_output, re.DOTALL)
        return None, found, None


@pytest.mark.parametrize("text", ["<call>" + " " * 4000, "<call>" + "\n\t " * 1500, "[[["])
def test_what_parsers_search_for_ever_ends(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "BOUNDS", Bounds(cpu_s=1, memory_bytes=1 << 30, alarm_s=20))
    parser: Any = timed(Searches)()
    assert parser.parse("<call>" + " " * 60 + "x</call>") == (None, ["x"], None)
    with pytest.raises(VLLMValidationError, match="takes too long to be parsed"):
        parser.parse(text)


async def test_a_coroutine_that_would_wait_is_told() -> None:
    with pytest.raises(RuntimeError, match="waits"):
        await aside(asyncio.sleep(0))


def serving(kind: type, **fields: object) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update({"parser_cls": Slow, "parser": Slow} | fields)
    return made


async def chats(kind: type, outputs: AsyncGenerator[Any]) -> Any:
    return await serving(kind).chat_completion_full_generator(
        SimpleNamespace(echo=False), outputs, "id", "name", []
    )


async def responses(kind: type, outputs: AsyncGenerator[Any]) -> Any:
    request = SimpleNamespace(stream=False, store=False)
    return await serving(kind, enable_store=False).responses_full_generator(
        request, None, outputs, SimpleContext()
    )


async def batches(kind: type, outputs: AsyncGenerator[Any]) -> Any:
    return await serving(kind).chat_completion_full_generator_batch(None, [outputs, these(3)])


@pytest.mark.parametrize(
    ("kind", "vllms", "method", "answer"),
    [
        (Chats, OpenAIServingChat, "chat_completion_full_generator", chats),
        (Batches, OpenAIServingChatBatch, "chat_completion_full_generator_batch", batches),
        (Messages, AnthropicServingMessages, "chat_completion_full_generator", chats),
        (Responses, OpenAIServingResponses, "responses_full_generator", responses),
    ],
    ids=["chats", "batches", "messages", "responses"],
)
async def test_the_loop_goes_on_while_a_whole_answer_is_parsed(
    kind: type, vllms: type, method: str, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser waits for the loop: on the loop itself it would do so in vain."""
    loop, turned = asyncio.get_running_loop(), threading.Event()

    async def parse(self: object, request: Any, *args: Any, **_: Any) -> Any:
        outputs = args[0] if method.startswith("chat") else args[1]
        for each in outputs if isinstance(outputs, list) else [outputs]:
            async for _output in each:
                pass
        loop.call_soon_threadsafe(turned.set)
        return turned.wait(TIMEOUT_S), request_context.current_context()

    monkeypatch.setattr(vllms, method, parse)
    context = request_context.begin()
    assert await answer(kind, these(1, 2)) == (True, context)


async def test_an_answer_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing() -> AsyncGenerator[Any]:
        yield 1
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        await chats(Chats, failing())

    async def wrong(*_: Any, **__: Any) -> Any:
        raise ValueError("odd")

    monkeypatch.setattr(OpenAIServingChat, "chat_completion_full_generator", wrong)
    with pytest.raises(ValueError, match="odd"):
        await chats(Chats, these(1))


async def test_a_client_keeps_one_thread_at_a_time() -> None:
    """Not even by giving up what it has begun."""
    ends, begun = threading.Event(), list[str]()

    async def parse(name: str, ended: threading.Event = ends) -> str:
        begun.append(name)
        ended.wait(TIMEOUT_S)
        return name

    def ask(client: str, *args: Any) -> "asyncio.Task[str]":
        request_context.begin().peer = client
        return asyncio.create_task(aside(parse(*args)))

    given_up, behind = ask("2001:db8::1", "first"), ask("2001:db8::2", "second")
    at_once = threading.Event()
    at_once.set()
    assert await ask("192.0.2.1", "of another", at_once) == "of another"
    given_up.cancel()
    assert await ask("192.0.2.1", "of another again", at_once) and "second" not in begun
    ends.set()
    assert await behind == "second"


class Derenderer:
    """The part of vLLM's that derenders, with a parser that takes a second for each output."""

    def __init__(self, parser: type[Parser] | None) -> None:
        self.parser = parser
        self.thread = ""

    def _derender_chat(self, answer: Any) -> list[str]:
        self.thread = threading.current_thread().name
        assert self.parser is not None
        if not answer.choices:
            raise ValueError("no choices")
        made: Any = self.parser
        return [made().parse("text") or str(len(each.token_ids)) for each in answer.choices]

    def _derender_chat_stream_parsed(self, kind: Any, *outputs: str) -> None:
        parser = kind()
        for output in outputs:
            parser.parse_delta(output)


class Idle(Parser):
    def __init__(self) -> None:
        """Needs no tokenizer."""

    def parse_delta(self, *args: Any, **options: Any) -> None:
        """Take no time."""

    def parse(self, *args: Any, **options: Any) -> None:
        """Take no time."""


def derendering(parser: type[Parser] | None = Idle) -> Any:
    derenderer = Derenderer(parser)
    serving = SimpleNamespace(online_derenderer=derenderer)
    app: Any = SimpleNamespace(state=SimpleNamespace(serving_derender=serving))
    derender_aside(app)
    return derenderer


def answer(*tokens: int) -> Any:
    return SimpleNamespace(choices=[SimpleNamespace(token_ids=[1] * each) for each in tokens])


def test_vllms_derenderer_is_taken_over() -> None:
    there = {name for name in DERENDERING if hasattr(OnlineDerenderer, name)}
    assert set(DERENDERING) - there <= {"_derender_text_choices"}  # since 0.33


async def test_outputs_are_derendered_on_no_thread_of_prompts() -> None:
    derenderer = derendering()
    assert await derenderer._derender_chat_async(answer(3, 4)) == ["3", "4"]
    assert derenderer.thread.startswith("answers")
    assert await derenderer._derender_chat_async(answer(FORKED_TOKENS, 1)) == ["4096", "1"]


async def test_what_is_wrong_with_long_outputs_is_said() -> None:
    derenderer = derendering()
    wrong = answer()
    wrong.output_token_ids = [1] * (FORKED_TOKENS + 1)
    with pytest.raises(ValueError, match="no choices"):
        await derenderer._derender_chat_async(wrong)


async def test_parsers_of_derendered_outputs_have_a_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client sends the outputs: a replayed stream of 8 KB took 40 s."""
    now = itertools.count(step=DERENDERED_S)
    monkeypatch.setattr(parsing, "time", SimpleNamespace(thread_time=lambda: next(now)))
    derenderer = derendering()
    with pytest.raises(VLLMValidationError, match="takes too long to be parsed"):
        await derenderer._derender_chat_stream_parsed_async(derenderer.parser, *"abc")
    with pytest.raises(VLLMValidationError, match="takes too long to be parsed"):
        await derenderer._derender_chat_async(answer(1, 1, 1))


async def test_endless_outputs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Idle):
        def parse(self, *args: Any, **options: Any) -> None:
            while True:
                pass

    monkeypatch.setattr(parsing, "BOUNDS", Bounds(1, 1 << 30, 60))
    with pytest.raises(VLLMValidationError, match="takes too long to be parsed"):
        await derendering(Endless)._derender_chat_async(answer(FORKED_TOKENS + 1))

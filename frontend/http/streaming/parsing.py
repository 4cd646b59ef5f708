"""Prevent the parsers of answers (tool calls, reasoning) from blocking the event loop.

vLLM parses on the event loop, the whole text again at each token, and a client decides what a model
writes: 8 KB of tool calls took a stream 40 s of the loop.
"""

import asyncio
import contextvars
import pickle
import re
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import FastAPI
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, FunctionCall
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import RequestOutput
from vllm.parser.abstract_parser import Parser

from common.aio.watched_threads import WatchedThreads
from common.errors import RequestRejectedError
from frontend.asgi import as_vllm_error
from frontend.bounded.forks import Bounds, forked
from frontend.client_turns import ClientTurns
from frontend.request_context import begin, current_context

T = TypeVar("T")

SLOW_S: Final = 0.002
"""CPU seconds of one output's parsing from which its stream waits, and its next outputs are parsed
in a thread. Usual texts take a tenth."""

LONG_OUTPUT: Final = 32
"""Characters from which an output of a stream is parsed in a thread: an engine or a slow client may
have gathered many tokens. 1.2 KB of nested objects took gemma4's parser 8 s of the event loop, and
the first 100 characters of them that came at once 0.5."""

LONG_S: Final = 0.1
"""CPU seconds of one output's parsing that a stream may take a few times only: the time grows with
each token, without end. Usual texts take it beyond 200 KB of one tool call."""

LONG_TEXT: Final = 4 << 10
"""Characters from which a whole answer is parsed in a process of its own. Regular expressions of
parsers take minutes for 64 KB of unclosed tool calls, and seconds for 16 KB. Threads can't be
ended: two such answers stopped the parsing of all others."""

LONG_OUTPUT_TEXT: Final = 512
"""Characters of an output of a stream from which parsing it is tried in a process of its own. The
time of some parsers grows with the cube of the text that comes at once."""

LONG_SPACE: Final = re.compile(r"\s{64}")
"""White space that makes an answer as long: of ``\\s*(.*?)\\s*``, which parsers search for, the
time grows with its cube. 2,000 spaces took 3.4 s in which no other thread ran, 4,000 took 28 s."""

LONG_PROMPT: Final = 2048
"""Tokens of a prompt from which a parser that reads its text, to see whether it leaves reasoning
open, does so in a process of its own. 8,000 times ``to=`` took muse_glimmer's 1.5 s of the event
loop, 65,000 would take a minute."""

SURROGATE: Final = re.compile("[\ud800-\udfff]")

BOUNDS: Final = Bounds(cpu_s=2, memory_bytes=256 << 20, alarm_s=20)
"""For one text. 200 KB of honest tool calls take 0.3 s."""

FEW: Final = 3
"""Times :data:`LONG_S` that long outputs of a stream may take in all, plus one for each 50 outputs:
a garbage collection is as long. Three outputs of 200 tokens each took inkling's parser 5 s."""

THREADS: Final = WatchedThreads("answers", 2, limit_s=float("inf"))
"""Parse whole answers, and outputs of slow streams. None is replaced: the length of the text bounds
the work."""

_clients: Final = ClientTurns(1)
"""One thread at a time per client: two requests of 16 choices, 4 KB each, kept granite's parser
from another client's answer for 111 s."""

DERENDERED_S: Final = 2.0
"""CPU seconds that parsers may take for one request to derender. vLLM parses all outputs of a
stream again for each of its pieces."""

FORKED_TOKENS: Final = 4096
"""Tokens from which outputs are derendered in a process of its own, as :data:`LONG_TEXT`."""

DERENDERING: Final = (
    "_derender_chat",
    "_derender_chat_stream_parsed",
    "_derender_completion",
    "_derender_text_choices",
    "_detokenize_delta",
)
"""Methods of vLLM's derenderer that it runs on the thread that the texts of all prompts need."""


class RequestParsing:
    """The parsers of a stream's choices, and CPU seconds that they took since its last output."""

    def __init__(self, *parsers: "_Timed") -> None:
        self.parsers = list(parsers)
        self.seconds = 0.0


class _ReadPrompts(list[tuple[Sequence[int], bool]]):
    """Long prompts of a request, and whether each ends its reasoning."""


class _Timed(Parser):
    """A parser that measures itself, and ends a stream that takes too long."""

    _outputs = 0
    _long_s = 0.0
    _ahead: tuple[str, DeltaMessage | None] | None = None

    def parse_ahead(self, delta_text: str, **options: object) -> None:
        """Parse what vLLM is to ask for next."""
        self._ahead = delta_text, self.parse_delta(delta_text, **options)

    def parse_delta(self, delta_text: str, *args: Any, **options: Any) -> DeltaMessage | None:
        """Raise VLLMError if the outputs before took too long."""
        if self._ahead is not None:
            (text, made), self._ahead = self._ahead, None
            if text != delta_text:
                raise RuntimeError("vLLM parses other outputs of a stream than it was given")
            return made
        if self._long_s > LONG_S * (FEW + self._outputs // 50):
            raise _too_long()
        begun = time.thread_time()
        try:
            made = super().parse_delta(delta_text, *args, **options)
            if made is not None:
                _escape_surrogates(call.function for call in made.tool_calls)
            return made
        finally:
            took = time.thread_time() - begun
            self._outputs += 1
            if took > LONG_S:
                self._long_s += took
            if (spent := current_context().find(RequestParsing)) is not None:
                spent.seconds += took

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        """Raise VLLMError if reading the prompt takes too long."""
        ends = super().is_reasoning_end
        if not _takes_long(type(self), input_ids):
            return ends(input_ids)
        if (known := current_context().find(_ReadPrompts)) is None:
            current_context().put(known := _ReadPrompts())
        for prompt, ended in known:
            if prompt == input_ids:
                return ended
        said = forked(None, lambda _: pickle.dumps(ends(input_ids)), BOUNDS)
        if not said:
            raise _too_long()
        known.append((input_ids, pickle.loads(said)))
        return known[-1][1]

    def parse(self, model_output: str, *args: Any, **options: Any) -> Any:
        """Raise VLLMError if it takes too long, or is nested too deeply."""
        made = _parsed(model_output, partial(super().parse, model_output, *args, **options))
        _escape_surrogates(made[2] or ())
        return made


def _takes_long(kind: type[Parser], prompt: Sequence[int]) -> bool:
    """Return whether a parser reads the text of a long prompt; most look for tokens alone."""
    if len(prompt) < LONG_PROMPT:
        return False
    reads = getattr(kind.reasoning_parser_cls, "is_reasoning_end", None)
    names = getattr(getattr(reads, "__code__", None), "co_names", ())
    return not {"decode", "_decode"}.isdisjoint(names)


def _parsed(model_output: str, make: Callable[[], T]) -> T:
    """Parse long texts in a fork, which costs up to 0.1 s; a standing process would need a
    tokenizer and all of vLLM. The fork's changes of the parser are lost: nothing reads them.
    """
    if len(model_output) <= LONG_TEXT and not LONG_SPACE.search(model_output):
        try:
            return make()
        except RecursionError as error:
            raise _too_long() from error
    said = forked(None, lambda _: pickle.dumps(make()), BOUNDS)
    if not said:
        raise _too_long()
    made: T = pickle.loads(said)
    return made


def _escape_surrogates(calls: Iterable[FunctionCall | DeltaFunctionCall | None]) -> None:
    """Write lone surrogates as JSON's escapes, since UTF-8 has none: a call whose arguments had
    ``"\\ud83d"`` was a 400 that blamed the client, as in plain vLLM.
    """
    for call in filter(None, calls):
        if call.name:
            call.name = _escaped(call.name)
        if call.arguments:
            call.arguments = _escaped(call.arguments)


def _escaped(text: str) -> str:
    return SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _too_long() -> Exception:
    return as_vllm_error(
        RequestRejectedError(
            "this answer or its prompt takes too long to be parsed for tool calls and reasoning, "
            "or can't be: ask for a shorter one, or without tools"
        )
    )


def timed(kind: type[Parser]) -> type[Parser]:
    """Return a subclass of a parser that reports its time to :func:`paced`."""
    return type(kind.__name__, (_Timed, kind), {})


class _Pace:
    """Limit slow parsers to half of the event loop, all streams together."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def wait(self, spent_s: float) -> None:
        """Wait as long as the parsers took, behind other waiting streams."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + spent_s
        await asyncio.sleep(self._free_at - now)


_pace: Final = _Pace()


def paced(
    request: object,
    outputs: AsyncIterable[T],
    answer_of: Callable[[T], RequestOutput | None],
    *parsers: "_Timed",
) -> AsyncGenerator[T]:
    """Return the outputs of a stream, each delayed by the parsing time of the one before. Long
    ones, and all after a slow one, are parsed in a thread before vLLM asks for them.

    Args:
        answer_of: returns what an output has for the parsers.
        parsers: of the stream's choices, unless they are made later.
    """
    parsing = RequestParsing(*parsers)
    current_context().put(parsing)
    return _paced(request, outputs, answer_of, parsing)


async def _paced(
    request: object,
    outputs: AsyncIterable[T],
    answer_of: Callable[[T], RequestOutput | None],
    parsing: RequestParsing,
) -> AsyncGenerator[T]:
    slow = False
    async for output in outputs:
        answer = answer_of(output)
        if answer is not None and not slow:
            prompt = answer.prompt_token_ids or ()
            slow = any(_takes_long(type(each), prompt) for each in parsing.parsers)
        if answer is not None and (slow or _is_long(answer)):
            await _in_turn(partial(_parse_ahead, parsing.parsers, request, answer))
        yield output
        if parsing.seconds > SLOW_S:
            slow = True
            await _pace.wait(parsing.seconds)
        parsing.seconds = 0.0


def _is_long(answer: RequestOutput) -> bool:
    return sum(len(part.text) for part in answer.outputs) > LONG_OUTPUT


def _parse_ahead(parsers: Sequence[_Timed], request: object, answer: RequestOutput) -> None:
    for part in answer.outputs:
        parse = partial(
            parsers[part.index].parse_ahead,
            part.text,
            delta_token_ids=list(part.token_ids),
            request=request,
            prompt_token_ids=answer.prompt_token_ids,
            finished=part.finish_reason is not None,
        )
        # A fork's changes of a parser are lost, which the next output needs: it is a trial.
        if len(part.text) > LONG_OUTPUT_TEXT and not forked(parse, _tried, BOUNDS):
            raise _too_long()
        parse()


def _tried(parse: Callable[[], None]) -> bytes:
    parse()
    return b"parsed"


def finished(parsing: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        parsing.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    parsing.close()
    raise RuntimeError("vLLM waits while it parses an answer, which a thread can't")


async def aside(
    parsing: Coroutine[Any, Any, T], run: Callable[[Coroutine[Any, Any, T]], T] = finished
) -> T:
    """Run a coroutine in a thread; the default ``run`` takes only ones that never suspend."""
    return await _in_turn(partial(run, parsing))


async def _in_turn(work: Callable[[], T]) -> T:
    return await _clients.run(THREADS, partial(contextvars.copy_context().run, work))


async def these(*outputs: T) -> AsyncGenerator[T]:
    """Yield outputs without waiting."""
    for output in outputs:
        yield output


async def read_prompt(serving: Any, request: Any, prompt: Any) -> None:
    """Have a parser read a long prompt aside, before vLLM asks it on the event loop."""
    tokens = serving._extract_prompt_components(prompt).token_ids or []
    if serving.parser_cls is not None and _takes_long(serving.parser_cls, tokens):
        options = serving._effective_chat_template_kwargs(request)
        parser = OpenAIServingChat._make_parser(
            serving, request, serving.renderer.tokenizer, options
        )
        await _in_turn(partial(parser.is_reasoning_end, tokens))


class ParsesAside(OpenAIServingChat):
    """vLLM's chats, whose parsers do not block the event loop."""

    parser_cls: type[Parser] | None = None

    async def render_chat_request(self, request: Any) -> Any:
        rendered = await super().render_chat_request(request)
        if isinstance(rendered, tuple):
            await read_prompt(self, request, rendered[1][0])
        return rendered

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **options: Any
    ) -> Any:
        make = super().chat_completion_full_generator
        if self.parser_cls is None:
            return await make(request, result_generator, *args, **options)
        outputs: list[Any] = []
        async for output in result_generator:
            outputs = [output]
        return await aside(make(request, these(*outputs), *args, **options))

    def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *args: Any, **options: Any
    ) -> AsyncGenerator[Any]:
        outputs = result_generator
        if self.parser_cls is not None:
            outputs = paced(request, outputs, lambda output: output)
        return super().chat_completion_stream_generator(request, outputs, *args, **options)

    def _make_parser(self, *args: Any, **options: Any) -> Parser:
        parser = super()._make_parser(*args, **options)
        stream = current_context().find(RequestParsing)
        if stream is not None and isinstance(parser, _Timed):
            stream.parsers.append(parser)
        return parser


class _Budgeted(Parser):
    """A parser that shares a time limit with all parsers of its request to derender."""

    def parse_delta(self, *args: Any, **options: Any) -> DeltaMessage | None:
        return _within_budget(super().parse_delta, *args, **options)

    def parse(self, *args: Any, **options: Any) -> Any:
        return _within_budget(super().parse, *args, **options)


def _within_budget(parse: Callable[..., T], *args: Any, **options: Any) -> T:
    spent = current_context().find(RequestParsing) or RequestParsing()
    if spent.seconds > DERENDERED_S:
        raise _too_long()
    began = time.thread_time()
    try:
        return parse(*args, **options)
    finally:
        spent.seconds += time.thread_time() - began


def derender_aside(app: FastAPI) -> None:
    """Derender outputs in threads of ours, with limits on the time of parsers."""
    serving = getattr(app.state, "serving_derender", None)
    if serving is None:
        return
    derenderer = serving.online_derenderer
    parser = derenderer.parser
    ours: dict[str, object] = {
        f"{name}_async": partial(_derender, parser is not None, getattr(derenderer, name))
        for name in DERENDERING
        if hasattr(derenderer, name)  # one is vLLM 0.33's
    }
    if parser is not None:
        ours["parser"] = type(parser.__name__, (_Budgeted, parser), {})
    vars(derenderer).update(ours)


async def _derender(parses: bool, work: Callable[..., T], *args: Any, **options: Any) -> T:
    make = partial(work, *args, **options)
    tokens = sum(map(_tokens_of, args)) if parses else 0
    return await _in_turn(partial(_derendered, make, tokens))


def _derendered(make: Callable[[], T], tokens: int) -> T:
    begin().put(RequestParsing())
    if tokens <= FORKED_TOKENS:
        return make()

    def tried(_: None) -> bytes:
        try:
            return pickle.dumps((make(), None))
        except ValueError as error:
            return pickle.dumps((None, str(error)))

    said = forked(None, tried, BOUNDS)
    if not said:
        raise _too_long()
    made: T
    made, wrong = pickle.loads(said)
    if wrong is not None:
        raise ValueError(wrong)
    return made


def _tokens_of(asked: Any) -> int:
    choices = getattr(asked, "choices", ())
    earlier = len(getattr(asked, "output_token_ids", ()))
    return earlier + sum(len(choice.token_ids or ()) for choice in choices)

"""Prevent the parsers of answers (tool calls, reasoning) from holding the event loop.

vLLM parses what the model wrote on the event loop. Parsers read the whole text again at each token,
and a client decides what a model writes: 8 KB of tool calls took a stream 40 s of the loop.
"""

import asyncio
import contextvars
import pickle
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
from typing import Any, Final, TypeVar

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.parser.abstract_parser import Parser

from common.aio.watched_threads import WatchedThreads
from common.errors import RequestRejectedError
from frontend.asgi import as_vllm_error
from frontend.bounded.forks import Bounds, forked
from frontend.request_context import current_context

T = TypeVar("T")

SLOW_S: Final = 0.002
"""CPU time of one output's parsing from which its stream waits. Usual texts take a tenth of it."""

LONG_S: Final = 0.1
"""CPU time of one output's parsing that a stream may take a few times only: it grows with each
token, and nothing ends it. Usual texts take it beyond 200 KB of one tool call."""

LONG_TEXT: Final = 16 << 10
"""Characters of a whole answer from which it is parsed in a process of its own. Expressions of
parsers search 64 KB of tool calls that do not end for minutes, and 16 KB for seconds. No thread can
be ended: two such answers kept all others from being parsed."""

BOUNDS: Final = Bounds(cpu_s=2, memory_bytes=256 << 20, alarm_s=20)
"""For one text. 200 KB of honest tool calls take 0.3 s."""

FEW: Final = 3
"""So many of a stream, and one of each hundred outputs: a garbage collection takes as long."""

THREADS: Final = WatchedThreads("answers", 2, limit_s=float("inf"))
"""Where whole answers are parsed. None is given up: the length of the answer bounds the work."""


class ParsingTime:
    """CPU time that the parsers of a request took since its last output.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0


class _Timed(Parser):
    """A parser that notes how long it takes, and gives up a stream that takes too long."""

    _outputs = 0
    _long = 0

    def parse_delta(self, *args: Any, **options: Any) -> DeltaMessage | None:
        """See vLLM.

        Raises:
            VLLMError: the outputs before took too long.
        """
        if self._long > FEW + self._outputs // 100:
            raise _too_long()
        begun = time.thread_time()
        try:
            return super().parse_delta(*args, **options)
        finally:
            took = time.thread_time() - begun
            self._outputs += 1
            self._long += took > LONG_S
            if (spent := current_context().find(ParsingTime)) is not None:
                spent.seconds += took

    def parse(self, model_output: str, *args: Any, **options: Any) -> Any:
        """See vLLM.

        A fork of this process takes up to 0.1 s, for long texts alone. A process that waits would
        need a tokenizer and all of vLLM. What a fork changes of the parser is lost: nothing reads
        it after a whole answer.

        Raises:
            VLLMError: it took too long.
        """
        make = super().parse
        if len(model_output) <= LONG_TEXT:
            return make(model_output, *args, **options)
        said = forked(None, lambda _: pickle.dumps(make(model_output, *args, **options)), BOUNDS)
        if not said:
            raise _too_long()
        return pickle.loads(said)


def _too_long() -> Exception:
    return as_vllm_error(
        RequestRejectedError(
            "this answer takes too long to be parsed for tool calls and reasoning, or can't be: "
            "ask for a shorter one, or without tools"
        )
    )


def timed(kind: type[Parser]) -> type[Parser]:
    """Return a class of parsers that tells :func:`paced` how long they take."""
    return type(kind.__name__, (_Timed, kind), {})


class _Pace:
    """Let slow parsers have half of the event loop at most, all streams together."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def wait(self, spent_s: float) -> None:
        """Wait as long as the parsers took, behind the other streams that wait."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + spent_s
        await asyncio.sleep(self._free_at - now)


_pace: Final = _Pace()


async def paced(outputs: AsyncIterable[T]) -> AsyncGenerator[T]:
    """Yield the outputs of a stream, each later by what the one before cost its parsers."""
    spent = ParsingTime()
    current_context().put(spent)
    async for output in outputs:
        yield output
        if spent.seconds > SLOW_S:
            await _pace.wait(spent.seconds)
        spent.seconds = 0.0


def finished(parsing: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
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
    """Run a coroutine in a thread, so that the event loop goes on.

    Args:
        run: by default takes coroutines alone that wait for nothing.
    """
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(THREADS, context.run, run, parsing)


async def these(*outputs: T) -> AsyncGenerator[T]:
    """Yield some outputs, without waiting."""
    for output in outputs:
        yield output


class ParsesAside(OpenAIServingChat):
    """vLLM's chats, whose parsers leave the event loop to others."""

    parser_cls: type[Parser] | None = None

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **options: Any
    ) -> Any:
        """See vLLM."""
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
        """See vLLM."""
        outputs = result_generator if self.parser_cls is None else paced(result_generator)
        return super().chat_completion_stream_generator(request, outputs, *args, **options)

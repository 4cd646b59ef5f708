"""Streams of chats and completions: vLLM's serving classes, with a direct way for their events.

Each event would pass all ASGI layers of the app. Here only the first one does, with the head of the
answer; the others go straight to the client's connection. Events of a plain stream bypass vLLM's
server too, which makes three Pydantic models of each token: see
:mod:`frontend.request.direct_events`.
"""

import asyncio
import secrets
import time
import traceback
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.middleware import Middleware
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs, CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateLogProbs,
    GenerateLogProbsContent,
)
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.utils.sse_keep_alive import (
    SSE_KEEP_ALIVE_COMMENT,
    with_sse_keep_alive,
)
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.sampling_params import BeamSearchParams

from common.errors import RequestRejectedError
from frontend.asgi import as_vllm_error
from frontend.gate import MAX_BEAM_CANDIDATES
from frontend.http.streaming.merging import merge
from frontend.http.streaming.parsing import ParsesAside, aside, read_prompt, these, timed
from frontend.http.streaming.whole_answers import (
    begin_whole_answer,
    columns,
    defer_prompt_logprobs,
    deferring,
    entries,
)
from frontend.request import DirectEvents, prompt_weight
from frontend.request_context import current_context

_Serving = TypeVar("_Serving", bound="_Streaming")
_LogProbs = TypeVar("_LogProbs", ChatCompletionLogProbs, GenerateLogProbs)

_Vllm: TypeAlias = Any
"""An argument or a result of a method of vLLM's."""

_HEADS_ONLY: Final = frozenset(
    {
        "prometheus_fastapi_instrumentator.middleware.PrometheusInstrumentatorMiddleware",
        "starlette.middleware.cors.CORSMiddleware",
        "vllm.entrypoints.serve.elastic_ep.middleware.ScalingMiddleware",
        "vllm.entrypoints.serve.middleware.x_request_id.XRequestIdMiddleware",
    }
)
"""Layers of the app that look at heads of answers and at no events."""

MAX_BEAM_TOKENS: Final = 1 << 26
"""Tokens of a prompt times beams times tokens to generate: 0.5 GB if beams end at each of these.
Engines read media again for each, so these count as in :func:`prompt_weight`."""

_UNREADABLE: Final = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    msgspec.MsgspecError,
)
"""Errors of vLLM's for an unreadable medium."""

_PARSING: Final = (
    "parse_delta",
    "_in_reasoning_phase",
    "_in_tool_call_phase",
    "_extract_tool_calls_streaming",
)
"""Methods of a parser that decide what a text becomes; parsers of some models override them."""


def own_streams(app: FastAPI) -> None:
    """Replace the serving objects of an app with subclasses."""
    state, passes_layers = app.state, _all_look_at_heads(app.user_middleware)
    interval = 0.0
    if passes_layers:
        # vLLM's routes would take a stream for idle whose events bypass them.
        interval = float(state.args.sse_keep_alive_interval)
        state.args = Namespace(**{**vars(state.args), "sse_keep_alive_interval": 0})
    for name, kind in _SERVING.items():
        if (serving := getattr(state, name, None)) is not None:
            setattr(state, name, kind.of(serving, passes_layers, interval))


def _all_look_at_heads(middleware: Iterable[Middleware]) -> bool:
    classes: list[object] = [each.cls for each in middleware]
    return all(
        isinstance(each, type) and f"{each.__module__}.{each.__qualname__}" in _HEADS_ONLY
        for each in classes
    )


class _Streaming(BeamSearchOnlineMixin):
    """The part of all serving classes here that sends streams and bounds beam searches."""

    _passes_layers: bool
    _comment_interval: float

    @classmethod
    def of(
        cls: type[_Serving], serving: object, passes_layers: bool, comment_interval: float
    ) -> _Serving:
        """Return an object of this class with the state of vLLM's own.

        Args:
            passes_layers: whether events may bypass the layers of the app.
            comment_interval: seconds after which an idle stream gets a comment; 0 for none.
        """
        made = cls.__new__(cls)
        parses = getattr(serving, "parser_cls", None)
        own = {} if parses is None else {"parser_cls": timed(skipping(parses))}
        made.__dict__.update(vars(serving), **own)
        made._passes_layers, made._comment_interval = passes_layers, comment_interval
        return made

    async def beam_search(
        self, prompt: _Vllm, request_id: str, params: BeamSearchParams, *args: Any, **options: Any
    ) -> AsyncGenerator[_Vllm]:
        """Raise VLLMError for too long a prompt: vLLM keeps the tokens of each beam that ended, the
        prompt's among them, and sends all of each beam to an engine at each token.

        Without ``max_tokens`` the answer ends where a gate would have refused it, with the reason
        ``length``: the limit on log probabilities would reject all of it then, after a minute.
        """
        tokens = prompt_weight(prompt)
        beams = params.beam_width
        most = max(1, MAX_BEAM_CANDIDATES // (beams * (2 * beams + 1)))
        params.max_tokens = min(params.max_tokens, most)
        if tokens * beams * params.max_tokens > MAX_BEAM_TOKENS:
            raise as_vllm_error(
                RequestRejectedError(
                    "a beam search repeats its prompt for each of its beams and tokens, more than "
                    f"{MAX_BEAM_TOKENS} tokens here: ask for fewer with `n` or `max_tokens`, or "
                    "send a shorter prompt, or fewer media"
                )
            )
        async with aclosing(
            super().beam_search(prompt, request_id, params, *args, **options)
        ) as outputs:
            async for output in outputs:
                yield output

    def _send(self, stream: AsyncGenerator[str], *, plain: bool) -> AsyncGenerator[str]:
        """Return the events for vLLM's route: the first one, and those that have to wait.

        Args:
            plain: whether an output becomes an event with its text and nothing else.
        """
        events = current_context().find(DirectEvents)
        if events is None or not self._passes_layers:
            return with_sse_keep_alive(stream, self._comment_interval)
        if plain:
            events.allow()
        return with_comments(_directly(stream, events), self._comment_interval, events)

    def _is_plain(self, request: ChatCompletionRequest | CompletionRequest) -> bool:
        return (
            request.n in (None, 1)
            and not request.use_beam_search
            and not request.echo  # sent as a separate event that looks like an output
            and not getattr(self, "enable_log_outputs", False)
        )


class _Chats(OpenAIServingChat):
    """vLLM's chats, alone and in batches: many log probabilities are built while they are sent."""

    def _create_chat_logprobs(
        self, token_ids: Sequence[int], top_logprobs: Sequence[Any], *args: Any, **options: Any
    ) -> ChatCompletionLogProbs:
        make = super()._create_chat_logprobs
        stand_in = ChatCompletionLogProbsContent(token=secrets.token_hex(16))
        return _in_slices(make, stand_in, token_ids, top_logprobs, *args, **options)


class Batches(_Streaming, _Chats, OpenAIServingChatBatch):
    async def render_batch_chat_request(self, request: Any) -> Any:
        rendered = await super().render_batch_chat_request(request)
        if isinstance(rendered, tuple):
            for single, _, prompt in zip(*rendered, strict=True):
                await read_prompt(self, single, prompt)
        return rendered

    async def chat_completion_full_generator_batch(
        self, request: Any, generators: list[Any], *args: Any, **options: Any
    ) -> Any:
        begin_whole_answer()
        last: dict[int, list[Any]] = {}
        async for number, output in merge(*generators):
            last[number] = [output]
        done = [these(*last.get(number, ())) for number in range(len(generators))]
        make = super().chat_completion_full_generator_batch
        return await aside(make(request, done, *args, **options), asyncio.run)


class Chats(_Streaming, _Chats, ParsesAside):
    """vLLM's chats. ``echo`` returns the last message as a string, as OpenAI's API does: templates
    of some models get lists of parts, which vLLM's streams would send.
    """

    def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: Any,
        request_id: str,
        model_name: str,
        conversation: list[Any],
        *args: Any,
        **options: Any,
    ) -> AsyncGenerator[str]:
        if request.echo:
            conversation = _with_text(conversation)
        stream = super().chat_completion_stream_generator(
            request, result_generator, request_id, model_name, conversation, *args, **options
        )
        return self._send(stream, plain=self._is_plain(request))

    async def chat_completion_full_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: Any,
        request_id: str,
        model_name: str,
        conversation: list[Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        if request.echo:
            conversation = _with_text(conversation)
        begin_whole_answer()
        answer = await super().chat_completion_full_generator(
            request, result_generator, request_id, model_name, conversation, *args, **options
        )
        defer_prompt_logprobs(answer)
        return answer

    def _make_parser(self, request: ChatCompletionRequest, *args: Any, **options: Any) -> Parser:
        parser = super()._make_parser(request, *args, **options)
        if (events := current_context().find(DirectEvents)) is not None:
            events.parsed_until(
                partial(takes_text_as_it_is, parser, request),
                skips_empty=parser.tool_parser is not None,
            )
        return parser


class Completions(_Streaming, OpenAIServingCompletion):
    def completion_stream_generator(
        self, request: CompletionRequest, engine_inputs: list[Any], *args: Any, **options: Any
    ) -> AsyncGenerator[str]:
        stream = super().completion_stream_generator(request, engine_inputs, *args, **options)
        # vLLM reads several prompts in tasks, and so before it has written their events.
        return self._send(stream, plain=len(engine_inputs) == 1 and self._is_plain(request))

    def request_output_to_completion_response(
        self, final_res_batch: list[Any], request: CompletionRequest, *args: Any, **options: Any
    ) -> Any:
        if not request.stream:  # or all of it is one event
            begin_whole_answer()
        answer = super().request_output_to_completion_response(
            final_res_batch, request, *args, **options
        )
        defer_prompt_logprobs(*answer.choices)
        return answer

    def _create_completion_logprobs(
        self, token_ids: Sequence[int], top_logprobs: Sequence[Any], *args: Any, **options: Any
    ) -> CompletionLogProbs:
        make = super()._create_completion_logprobs
        if (parts := deferring(top_logprobs)) is None:
            return make(token_ids, top_logprobs, *args, **options)
        offset = options.pop("initial_text_offset", 0)

        def some(part: slice) -> dict[str, list[object]]:
            nonlocal offset
            options["initial_text_offset"] = offset
            made = make(token_ids[part], top_logprobs[part], *args, **options)
            offset = made.text_offset[-1] + len(made.tokens[-1])
            return made.model_dump()

        stand_in = CompletionLogProbs(tokens=[secrets.token_hex(16)])
        parts.add(stand_in.model_dump(), columns(len(token_ids), some))
        return stand_in


class Tokens(_Streaming, ServingTokens):
    async def serve_tokens(self, *args: _Vllm, **options: _Vllm) -> _Vllm:
        """Reject unreadable tensors with 400: vLLM takes them for a fault of its own."""
        try:
            return await super().serve_tokens(*args, **options)
        except _UNREADABLE as error:
            frames = traceback.walk_tb(error.__traceback__)
            if all(frame.f_code.co_name != decode_mm_kwargs_item.__name__ for frame, _ in frames):
                raise
            raise as_vllm_error(
                RequestRejectedError(
                    "`kwargs_data` or `mm_metadata` of `features` has something that is no medium "
                    "as `/v1/chat/completions/render` gives it"
                )
            ) from error

    async def serve_tokens_full_generator(self, *args: _Vllm, **options: _Vllm) -> _Vllm:
        begin_whole_answer()
        answer = await super().serve_tokens_full_generator(*args, **options)
        defer_prompt_logprobs(answer)
        return answer

    def _create_text_logprobs(
        self,
        token_ids: Sequence[int],
        top_logprobs: Sequence[_Vllm],
        *args: _Vllm,
        **options: _Vllm,
    ) -> ChatCompletionLogProbs:
        make = super()._create_text_logprobs
        stand_in = ChatCompletionLogProbsContent(token=secrets.token_hex(16))
        return _in_slices(make, stand_in, token_ids, top_logprobs, *args, **options)

    def _create_tokens_logprobs(
        self,
        token_ids: Sequence[int],
        top_logprobs: Sequence[_Vllm],
        *args: _Vllm,
        **options: _Vllm,
    ) -> GenerateLogProbs:
        make = super()._create_tokens_logprobs
        stand_in = GenerateLogProbsContent(token_id=secrets.randbits(62), logprob=0.0)
        return _in_slices(make, stand_in, token_ids, top_logprobs, *args, **options)


_SERVING: Final[Mapping[str, type[_Streaming]]] = {
    "openai_serving_chat": Chats,
    "openai_serving_chat_batch": Batches,
    "openai_serving_completion": Completions,
    "serving_tokens": Tokens,
}


def _in_slices(
    make: Callable[..., _LogProbs],
    stand_in: ChatCompletionLogProbsContent | GenerateLogProbsContent,
    token_ids: Sequence[int],
    top_logprobs: Sequence[_Vllm],
    *args: _Vllm,
    **options: _Vllm,
) -> _LogProbs:
    """Return vLLM's log probabilities of tokens: all, or a stand-in if they are deferred."""
    if (parts := deferring(top_logprobs)) is None:
        return make(token_ids, top_logprobs, *args, **options)

    def some(part: slice) -> list[object]:
        made = make(token_ids[part], top_logprobs[part], *args, **options)
        return [each.model_dump() for each in made.content or ()]

    parts.add(stand_in.model_dump(), entries(len(token_ids), some))
    made = make([], [], *args, **options)
    made.content = [stand_in]
    return made


def _with_text(conversation: list[Any]) -> list[Any]:
    """Join the texts of the last message, as vLLM's whole answers do; media have none."""
    if not conversation or not isinstance(conversation[-1].get("content"), list):
        return conversation
    text = "\n".join(part["text"] for part in conversation[-1]["content"] if "text" in part)
    return [*conversation[:-1], {**conversation[-1], "content": text}]


class _Skipping(DelegatingParser):
    """A parser that is skipped once it passes texts unchanged."""

    _asked: bool = True

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """Pass a text unchanged if possible. The parser may add to the last one."""
        if self._asked or finished:
            message = super().parse_delta(
                delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
            )
            self._asked = not takes_text_as_it_is(self, request)
            return message
        return DeltaMessage(content=delta_text) if delta_text or not self.tool_parser else None


def skipping(kind: type[Parser]) -> type[Parser]:
    """Return a subclass of a parser that skips needless parsing, if the class allows it."""
    usual = all(getattr(kind, name, None) is getattr(DelegatingParser, name) for name in _PARSING)
    return type(kind.__name__, (_Skipping, kind), {}) if usual else kind


def takes_text_as_it_is(parser: Parser, request: ChatCompletionRequest) -> bool:
    """Return whether a parser will make content of each further text and nothing else.

    With parsers, vLLM also parses streams of requests without tools, and joins all tokens of an
    answer anew at each of them. A tool parser makes nothing of an empty text.
    """
    if not isinstance(parser, _Skipping):
        return False
    state = parser._stream_state
    return bool(
        request.include_reasoning
        and state.reasoning_ended
        and (
            parser._tool_parser is None
            or (
                request.tool_choice == "none"
                and state.tool_call_text_started
                and not state.engine_based
            )
        )
    )


async def _directly(stream: AsyncGenerator[str], events: DirectEvents) -> AsyncGenerator[str]:
    """Write events directly; yield the first, which goes with the head, and unwritable ones."""
    begun = False
    async with aclosing(stream):
        async for event in stream:
            piece = event.encode()
            if not begun or not events.write(piece):
                yield event
                begun = True
            events.saw(piece)  # sent: only then the reader asks for more


def with_comments(
    stream: AsyncGenerator[str], interval: float, events: DirectEvents
) -> AsyncGenerator[str]:
    """Add a comment whenever the client gets nothing for ``interval`` seconds, if that is positive
    and finite. ``events`` bypass the stream.
    """
    return _with_comments(stream, interval, events) if 0 < interval < float("inf") else stream


async def _with_comments(
    stream: AsyncGenerator[str], interval: float, events: DirectEvents
) -> AsyncGenerator[str]:
    said_at = time.monotonic()
    coming = asyncio.ensure_future(anext(stream))
    try:
        while True:
            left = max(said_at, events.sent_at) + interval - time.monotonic()
            if left > 0 and not coming.done():
                await asyncio.wait({coming}, timeout=left)
                continue  # an event may have bypassed the stream meanwhile
            if coming.done():
                try:
                    event = coming.result()
                except StopAsyncIteration:
                    return
                yield event
                coming = asyncio.ensure_future(anext(stream))
            else:
                yield SSE_KEEP_ALIVE_COMMENT
            said_at = time.monotonic()
    finally:
        coming.cancel()
        # The reader of this stream has left, or got the error.
        await asyncio.gather(coming, return_exceptions=True)
        await stream.aclose()

"""Errors of streams: with a status before the first byte, as the route's own event afterwards.

vLLM's server answers 200 as soon as a prompt is rendered, and reports later errors, e.g. that all
workers are busy, as the only event. A client or load balancer would see a success.

vLLM's Anthropic route reads a chat's error as a chunk, and tells what Pydantic says to that; its
Responses route closes the connection. Here
an error after the first output is the event that clients of the route know.
"""

import json
import re
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Final, NoReturn

from fastapi import FastAPI
from openai.types.responses import ResponseErrorEvent, ResponseOutputText
from openai.types.responses.response_output_text import Logprob
from openai.types.responses.response_text_delta_event import Logprob as DeltaLogprob
from openai.types.responses.response_text_delta_event import (
    LogprobTopLogprob as DeltaTopLogprob,
)
from pydantic import ValidationError
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError, VLLMError
from vllm.outputs import RequestOutput
from vllm.parser.abstract_parser import Parser

from frontend.asgi import Arrival, Message, Send, blaming_a_lack_of_files
from frontend.http.error_shapes import as_anthropics
from frontend.http.limits.connection import WRITE_NOW
from frontend.http.streaming.parsing import ParsesAside, aside, paced, these, timed
from frontend.http.streaming.whole_answers import (
    DeferredParts,
    begin_whole_answer,
    deferring,
    entries,
    joined,
    written,
)
from frontend.request import DirectEvents
from frontend.request_context import current_context

_ERROR_EVENT: Final = re.compile(rb'(?:event: \w+\n)?data: (\{"error".*)')

EARLY: Final = "data: "
"""Prefix of an error that comes first, whose event has no name."""

_WHOLE: Final = frozenset({"response.completed", "response.incomplete"})
_REPEATING: Final = _WHOLE | {"response.content_part.done", "response.output_item.done"}
_BEFORE_OUTPUT: Final = frozenset({"response.created", "response.in_progress"})


def say_errors(app: FastAPI) -> None:
    """Replace the serving objects of an app with subclasses."""
    for name, kind in _SERVING.items():
        if (serving := getattr(app.state, name, None)) is not None:
            ours: type = kind or type("Chats", (ParsesAside, type(serving)), {})
            made: Any = object.__new__(ours)
            vars(made).update(vars(serving))
            for parses in ("parser_cls", "parser"):
                if (parser := getattr(made, parses, None)) is not None:
                    setattr(made, parses, timed(parser))
            setattr(app.state, name, made)


class Messages(ParsesAside, AnthropicServingMessages):
    """vLLM's messages in Anthropic's form."""

    async def create_messages(self, *args: Any, **options: Any) -> Any:
        with blaming_a_lack_of_files():  # vLLM's route makes a 500 of what it does not know
            return await super().create_messages(*args, **options)

    async def message_stream_converter(self, generator: AsyncGenerator[Any]) -> AsyncGenerator[str]:
        failed: ErrorResponse | None = None

        async def until_error() -> AsyncGenerator[Any]:
            nonlocal failed
            async with aclosing(generator):
                async for item in generator:
                    if (failed := _error_of(item)) is not None:
                        return
                    yield item

        begun = False
        async with aclosing(super().message_stream_converter(until_error())) as events:
            async for event in events:
                if failed is not None:
                    break  # vLLM 0.33 would end the message as if it were whole
                begun = True
                yield event
        if failed is None:
            return
        if begun:
            said = json.dumps(as_anthropics(failed.error.code, failed.model_dump_json().encode()))
            yield f"event: error\n{EARLY}{said}\n\n"
        else:
            yield f"{EARLY}{failed.model_dump_json()}\n\n"


class Responses(OpenAIServingResponses):
    """vLLM's responses, with error events and deferred log probabilities."""

    parser: type[Parser] | None = None

    async def responses_stream_generator(
        self,
        request: ResponsesRequest,
        params: Any,
        outputs: Any,
        context: Any,
        *args: Any,
        **options: Any,
    ) -> AsyncGenerator[Any]:
        if self.parser is not None:
            outputs = paced(request, outputs, _answer_of, context.response_parser)
        args = params, outputs, context, *args
        held: list[Any] = []
        number = -1
        parts = None if self._stores(request) else current_context().find(DeferredParts)
        logprobs = None if parts is None else _Logprobs(parts)
        if logprobs is not None:
            current_context().put(logprobs)
        try:
            async for event in super().responses_stream_generator(request, *args, **options):
                number = event.sequence_number
                if logprobs is not None:
                    logprobs.put(event)
                    vars(context).get("_accumulated_logprobs", []).clear()  # nothing reads them
                if event.type in _BEFORE_OUTPUT:
                    held.append(event)
                    continue
                for each in held:
                    yield each
                held.clear()
                yield event
        except VLLMError as error:
            failed = self.create_error_response(error)
            yield failed if held else _said(failed, number + 1)

    async def responses_full_generator(
        self,
        request: ResponsesRequest,
        params: Any,
        outputs: Any,
        context: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Make an answer, or a stream's last event, which repeats the whole answer."""
        if not self._stores(request):
            begin_whole_answer()
        make = super().responses_full_generator
        # Other contexts run tools, and await them.
        if self.parser is None or not isinstance(context, SimpleContext):
            return await make(request, params, outputs, context, *args, **options)
        async for _ in outputs:
            pass
        return await aside(make(request, params, these(), context, *args, **options))

    def _stores(self, request: ResponsesRequest) -> bool:
        """Return whether vLLM stores the answer, which must be complete then."""
        return bool(self.enable_store and request.store)

    def _create_response_logprobs(
        self, token_ids: Sequence[int], logprobs: Any, *args: Any, **options: Any
    ) -> list[Logprob]:
        make = super()._create_response_logprobs
        if (stream := current_context().find(_Logprobs)) is not None:
            return stream.keep(make(token_ids, logprobs, *args, **options))
        if (parts := deferring(logprobs)) is None:
            return make(token_ids, logprobs, *args, **options)

        def some(part: slice) -> list[object]:
            return _dumped(make(token_ids[part], logprobs[part], *args, **options))

        stand_in = _stand_in()
        parts.add(_dumped([stand_in])[0], entries(len(token_ids), some))
        return [stand_in]

    def _convert_generation_error_to_streaming_response(self, e: GenerationError) -> NoReturn:
        # vLLM makes an event of it that does not validate.
        raise e


def _answer_of(context: object) -> RequestOutput | None:
    """Return what vLLM parses next; other contexts have parsed it."""
    return context.last_output if isinstance(context, SimpleContext) else None


class _Logprobs:
    """Log probabilities of a stream as JSON, which its last events repeat.

    vLLM would keep objects of all candidates: garbage collections of a quarter of a million stopped
    the event loop for two seconds.
    """

    def __init__(self, parts: DeferredParts) -> None:
        self._parts = parts
        self._next: dict[str, list[Logprob]] = {}
        self._kept: dict[str, list[bytes]] = {}

    def keep(self, made: list[Logprob]) -> list[Logprob]:
        """Return a stand-in for an output's log probabilities, if it has any."""
        if not made:
            return made
        stand_in = _stand_in()
        self._next[stand_in.token] = made
        self._kept[stand_in.token] = [written(_dumped(made))[1:-1]]
        return [stand_in]

    def put(self, event: Any) -> None:
        """Replace the stand-ins of an event with log probabilities."""
        if event.type == "response.output_text.delta":
            stand_ins, event.logprobs = event.logprobs, []
            for each in stand_ins:
                event.logprobs += map(_of_delta, self._next.pop(each.token))
        elif event.type in _REPEATING:
            for text in _texts_of(event):
                if stand_ins := text.logprobs:
                    every = [one for each in stand_ins for one in self._kept.pop(each.token)]
                    self._kept[stand_ins[0].token] = every
                    text.logprobs = stand_ins[:1]
                    self._parts.add(_dumped(text.logprobs)[0], joined(every))


def _of_delta(made: Logprob) -> DeltaLogprob:
    return DeltaLogprob(
        token=made.token,
        logprob=made.logprob,
        top_logprobs=[
            DeltaTopLogprob(token=each.token, logprob=each.logprob) for each in made.top_logprobs
        ],
    )


def _dumped(logprobs: list[Logprob]) -> list[object]:
    return [each.model_dump(mode="json", by_alias=True) for each in logprobs]


def _stand_in() -> Logprob:
    return Logprob(token=secrets.token_hex(16), bytes=[], logprob=0.0, top_logprobs=[])


def _texts_of(event: Any) -> Iterator[ResponseOutputText]:
    """Yield the texts of an event, which are the same objects in all events."""
    items = event.response.output if event.type in _WHOLE else [event]
    for item in items:
        item = getattr(item, "item", item)
        parts = getattr(item, "content", None) or [getattr(item, "part", None)]
        yield from (part for part in parts if isinstance(part, ResponseOutputText))


_SERVING: Final[Mapping[str, type | None]] = {
    "anthropic_serving_messages": Messages,
    "cohere_serving_chat_v2": None,  # vLLM's class needs a package
    "openai_serving_responses": Responses,
}


def _error_of(item: Any) -> ErrorResponse | None:
    """Return the error in a chunk of a chat, as vLLM 0.33 has it or 0.32 writes it."""
    if isinstance(item, ErrorResponse):
        return item
    if isinstance(item, str) and item.startswith('data: {"error"'):
        return ErrorResponse.model_validate_json(item.removeprefix(EARLY))
    return None


def _said(failed: ErrorResponse, number: int) -> ResponseErrorEvent:
    return ResponseErrorEvent(
        type="error",
        code=str(failed.error.code),
        message=failed.error.message,
        param=failed.error.param,
        sequence_number=number,
    )


async def hold_stream_heads(arrival: Arrival) -> None:
    """Hold a stream's head back until its first event; offer later ones the direct way."""
    write = arrival.scope.get(WRITE_NOW)
    if write is not None:
        events = DirectEvents(write)
        arrival.context.put(events)
        arrival.held.callback(events.close)
    send = arrival.send
    head: Message | None = None
    failed = False

    async def hold(message: Message) -> None:
        nonlocal head, failed
        if failed:
            return  # the end of a stream that became an error
        if _starts_stream(message):
            head = message
            return
        if head is not None:
            held, head = head, None
            error = _error_in(message.get("body", b""))
            if error is not None:
                failed = True
                await _send_error(held, error, send)
                return
            await send(held)
        await send(message)

    arrival.send = hold


def _starts_stream(message: Message) -> bool:
    return (
        message["type"] == "http.response.start"
        and message["status"] == HTTPStatus.OK
        and any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message.get("headers", ())
        )
    )


def _error_in(body: bytes) -> ErrorResponse | None:
    event = _ERROR_EVENT.match(body)
    if event is None:
        return None
    try:
        return ErrorResponse.model_validate_json(event[1])
    except ValidationError:
        return None  # not vLLM's: a stream like any other


async def _send_error(head: Message, error: ErrorResponse, send: Send) -> None:
    body = error.model_dump_json().encode()
    headers = [
        (name, value)
        for name, value in head.get("headers", ())
        if name.lower() not in (b"content-type", b"content-length")
    ]
    headers.append((b"content-type", b"application/json"))
    headers.append((b"content-length", b"%d" % len(body)))
    await send({**head, "status": error.error.code, "headers": headers})
    await send({"type": "http.response.body", "body": body})

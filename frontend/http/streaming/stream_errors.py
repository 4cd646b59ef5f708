"""What a stream of vLLM's Anthropic and Responses routes says when its request fails.

vLLM has a chat's error read as a chunk on the Anthropic route, and its client gets what Pydantic
says to that. On the Responses route it closes the connection. Here an error before the first
output goes to :mod:`.early_stream_errors`, which answers with its status; a
later one is the event that clients of the route know.
"""

import json
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, NoReturn

from fastapi import FastAPI
from openai.types.responses import ResponseErrorEvent, ResponseOutputText
from openai.types.responses.response_output_text import Logprob
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError, VLLMError
from vllm.parser.abstract_parser import Parser

from frontend.http.error_shapes import as_anthropics
from frontend.http.streaming.parsing import ParsesAside, aside, paced, these, timed
from frontend.http.streaming.whole_answers import (
    SLICE,
    DeferredParts,
    begin_whole_answer,
    deferring,
    entries,
)
from frontend.request_context import current_context

EARLY: Final = "data: "
"""Before an error that comes first: no event has a name then."""

_REPEATING: Final = frozenset(
    {"response.content_part.done", "response.output_item.done", "response.completed"}
)
_BEFORE_OUTPUT: Final = frozenset({"response.created", "response.in_progress"})


def say_errors(app: FastAPI) -> None:
    """Put subclasses of vLLM's serving classes where the routes of an app look for them."""
    for name, kind in _SERVING.items():
        if (serving := getattr(app.state, name, None)) is not None:
            made = kind.__new__(kind)
            vars(made).update(vars(serving))
            for parses in ("parser_cls", "parser"):
                if (parser := getattr(made, parses, None)) is not None:
                    setattr(made, parses, timed(parser))
            setattr(app.state, name, made)


class Messages(ParsesAside, AnthropicServingMessages):
    """vLLM's messages in Anthropic's form."""

    async def message_stream_converter(self, generator: AsyncGenerator[Any]) -> AsyncGenerator[str]:
        """See vLLM."""
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
    """vLLM's responses."""

    parser: type[Parser] | None = None

    async def responses_stream_generator(
        self, request: ResponsesRequest, params: Any, outputs: Any, *args: Any, **options: Any
    ) -> AsyncGenerator[Any]:
        """See vLLM."""
        args = params, outputs if self.parser is None else paced(outputs), *args
        held: list[Any] = []
        number = -1
        logprobs = None if self._stores(request) else _Logprobs()
        try:
            async for event in super().responses_stream_generator(request, *args, **options):
                number = event.sequence_number
                if logprobs is not None:
                    logprobs.defer(event)
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
        """See vLLM. Of a stream it is the last event, which has the whole answer once more."""
        if not self._stores(request):
            begin_whole_answer()
        make = super().responses_full_generator
        # Other contexts run tools, and wait for these.
        if self.parser is None or not isinstance(context, SimpleContext):
            return await make(request, params, outputs, context, *args, **options)
        async for _ in outputs:
            pass
        return await aside(make(request, params, these(), context, *args, **options))

    def _stores(self, request: ResponsesRequest) -> bool:
        """Return whether vLLM keeps the answer, which then has to have all its parts."""
        return bool(self.enable_store and request.store)

    def _create_response_logprobs(
        self, token_ids: Sequence[int], logprobs: Any, *args: Any, **options: Any
    ) -> list[Logprob]:
        make = super()._create_response_logprobs
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


class _Logprobs:
    """The log probabilities of all tokens of a stream, which its last events repeat."""

    def __init__(self) -> None:
        self._parts = current_context().find(DeferredParts)
        self._deferred: dict[str, list[Logprob]] = {}

    def defer(self, event: Any) -> None:
        """Have those of one of the last events be written piece by piece."""
        if self._parts is not None and event.type in _REPEATING:
            for text in _texts_of(event):
                if text.logprobs and len(text.logprobs) > SLICE:
                    stand_in = _stand_in()
                    self._deferred[stand_in.token] = text.logprobs
                    text.logprobs = [stand_in]
                self._put(text.logprobs or (), self._parts)

    def _put(self, logprobs: Iterable[Logprob], parts: DeferredParts) -> None:
        for each in logprobs:
            if (every := self._deferred.get(each.token)) is not None:
                some = partial(_some_of, every)
                parts.add(_dumped([each])[0], entries(len(every), some))


def _some_of(logprobs: list[Logprob], part: slice) -> list[object]:
    return _dumped(logprobs[part])


def _dumped(logprobs: list[Logprob]) -> list[object]:
    return [each.model_dump(mode="json", by_alias=True) for each in logprobs]


def _stand_in() -> Logprob:
    return Logprob(token=secrets.token_hex(16), bytes=[], logprob=0.0, top_logprobs=[])


def _texts_of(event: Any) -> Iterator[ResponseOutputText]:
    """Yield the texts within an event, which are the same objects in all events."""
    items = event.response.output if event.type == "response.completed" else [event]
    for item in items:
        item = getattr(item, "item", item)
        parts = getattr(item, "content", None) or [getattr(item, "part", None)]
        yield from (part for part in parts if isinstance(part, ResponseOutputText))


_SERVING: Final = {
    "anthropic_serving_messages": Messages,
    "openai_serving_responses": Responses,
}


def _error_of(item: Any) -> ErrorResponse | None:
    """The error that a chunk of a chat is, as vLLM 0.33 has it, or 0.32 writes it."""
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

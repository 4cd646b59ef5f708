"""What a stream of vLLM's Anthropic and Responses routes says when its request fails.

vLLM has a chat's error read as a chunk on the Anthropic route, and its client gets what Pydantic
says to that. On the Responses route it closes the connection. Here an error before the first
output goes to :mod:`.early_stream_errors`, which answers with its status; a
later one is the event that clients of the route know.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, NoReturn

from fastapi import FastAPI
from openai.types.responses import ResponseErrorEvent
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError, VLLMError

from frontend.http.error_shapes import as_anthropics

EARLY: Final = "data: "
"""Before an error that comes first: no event has a name then."""

_BEFORE_OUTPUT: Final = frozenset({"response.created", "response.in_progress"})


def say_errors(app: FastAPI) -> None:
    """Put subclasses of vLLM's serving classes where the routes of an app look for them."""
    for name, kind in _SERVING.items():
        if (serving := getattr(app.state, name, None)) is not None:
            made = kind.__new__(kind)
            vars(made).update(vars(serving))
            setattr(app.state, name, made)


class Messages(AnthropicServingMessages):
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

    async def responses_stream_generator(self, *args: Any, **options: Any) -> AsyncGenerator[Any]:
        """See vLLM."""
        held: list[Any] = []
        number = -1
        try:
            async for event in super().responses_stream_generator(*args, **options):
                number = event.sequence_number
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

    def _convert_generation_error_to_streaming_response(self, e: GenerationError) -> NoReturn:
        # vLLM makes an event of it that does not validate.
        raise e


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

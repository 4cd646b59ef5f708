"""Make whole answers with many log probabilities aside from the event loop.

vLLM makes a pydantic model of each, 15 µs of the loop: those of 12,000 tokens with 20 candidates
stopped all other requests for four seconds.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import RequestOutput

MANY: Final = 512
"""Tokens with log probabilities of their own, from which an answer goes aside."""

_NAME: Final = OpenAIServingChat.chat_completion_full_generator.__name__


def install() -> None:
    """Let the whole answers of this process be made so, by what makes them now."""
    setattr(OpenAIServingChat, _NAME, aside(getattr(OpenAIServingChat, _NAME)))


def aside(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that waits for the last output here, and makes a large answer in a thread."""

    @functools.wraps(make)
    async def made(
        serving: Any, request: Any, outputs: AsyncIterator[Any], *args: Any, **options: Any
    ) -> Any:
        last: RequestOutput | None = None
        try:
            async for output in outputs:
                last = output
        except asyncio.CancelledError as error:
            return await make(serving, request, _again(last, error), *args, **options)
        making = functools.partial(make, serving, request, _again(last), *args, **options)
        if last is None or not _is_large(last):
            return await making()
        return await asyncio.to_thread(lambda: asyncio.run(making()))

    return made


async def _again(
    last: RequestOutput | None, error: BaseException | None = None
) -> AsyncIterator[RequestOutput]:
    if last is not None:
        yield last
    if error is not None:
        raise error


def _is_large(answer: RequestOutput) -> bool:
    return sum(len(one.logprobs) for one in answer.outputs if one.logprobs) > MANY

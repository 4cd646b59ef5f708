"""Which streams of vLLM's server say the text of an answer and nothing else.

Others may write their events: see :mod:`frontend.request.direct_events`.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

from frontend.http.streaming.echo import with_text
from frontend.request import current_events

_chat: Final = with_text(OpenAIServingChat.chat_completion_stream_generator)
_completion: Final = OpenAIServingCompletion.completion_stream_generator


def install() -> None:
    """Look at all streams of this process when they begin."""
    setattr(OpenAIServingChat, _chat.__name__, _stream_chat)
    setattr(OpenAIServingCompletion, _completion.__name__, _stream_completion)


def _stream_chat(
    serving: OpenAIServingChat, request: ChatCompletionRequest, *args: Any, **options: Any
) -> AsyncGenerator[str]:
    events = current_events.get()
    if events is not None and _is_plain(serving, request):
        events.allow(parsed=serving.parser_cls is not None)
    stream: AsyncGenerator[str] = _chat(serving, request, *args, **options)
    return stream


def _stream_completion(
    serving: OpenAIServingCompletion,
    request: CompletionRequest,
    engine_inputs: Sequence[Any],
    *args: Any,
    **options: Any,
) -> AsyncGenerator[str]:
    events = current_events.get()
    # Those of several prompts vLLM reads in tasks, and so before it has written their events.
    if events is not None and len(engine_inputs) == 1 and _is_plain(serving, request):
        events.allow(parsed=False)
    stream: AsyncGenerator[str] = _completion(serving, request, engine_inputs, *args, **options)
    return stream


def _is_plain(
    serving: OpenAIServingChat | OpenAIServingCompletion,
    request: ChatCompletionRequest | CompletionRequest,
) -> bool:
    """Whether nothing is made of an output but an event; what that says the event itself shows."""
    return (
        request.n in (None, 1)
        and not request.use_beam_search
        and not request.echo  # an event of its own, much like the others
        and not getattr(serving, "enable_log_outputs", False)
    )

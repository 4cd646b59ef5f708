"""Let ``echo`` give the last message as a string, as OpenAI's API has it.

Templates of some models get contents as lists of parts, and vLLM's streams would send such a list.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

_whole: Final = OpenAIServingChat.chat_completion_full_generator


def install() -> None:
    """Let all whole answers of this process be made so; streams see to it themselves."""
    setattr(OpenAIServingChat, _whole.__name__, with_text(_whole))


def with_text(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes answers of a conversation whose last message is a string if the
    request has ``echo``.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(serving: OpenAIServingChat, request: Any, *args: Any, **options: Any) -> Any:
        if not request.echo:
            return make(serving, request, *args, **options)
        bound = signature.bind(serving, request, *args, **options)
        conversation = bound.arguments["conversation"]
        if conversation and isinstance(conversation[-1].get("content"), list):
            last = {**conversation[-1], "content": _text_of(conversation[-1]["content"])}
            bound.arguments["conversation"] = [*conversation[:-1], last]
        return make(*bound.args, **bound.kwargs)

    return made


def _text_of(parts: list[Any]) -> str:
    """The texts of a message, joined as vLLM's whole answers join them; its media have none."""
    return "\n".join(part["text"] for part in parts if "text" in part)

"""What is echoed is text, whatever the template of the model gets."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from frontend.http.streaming.echo import with_text

PARTS = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]


def echoed(content: object, *, echo: bool = True, by_name: bool = False) -> Any:
    """The last of the messages that vLLM's method is given."""

    def make(self: object, request: object, conversation: list[dict[str, Any]]) -> Any:
        return conversation[-1]["content"] if conversation else None

    given: Any = [] if content is None else [{"content": "x"}, {"role": "a", "content": content}]
    before = [dict(message) for message in given]
    made, request = with_text(make), SimpleNamespace(echo=echo)
    serving: Any = None
    if by_name:
        answer = made(serving, request, conversation=given)
    else:
        answer = made(serving, request, given)
    assert given == before
    return answer


@pytest.mark.parametrize("by_name", [True, False])
def test_parts_become_text_as_in_whole_answers(by_name: bool) -> None:
    assert echoed(PARTS, by_name=by_name) == "one\ntwo"


@pytest.mark.parametrize("content", ["text", "", None])
def test_all_else_stays(content: object) -> None:
    assert echoed(content) == content


def test_without_echo_nothing_is_looked_at() -> None:
    assert echoed(PARTS, echo=False) == PARTS


@pytest.mark.parametrize(
    "name", ["chat_completion_stream_generator", "chat_completion_full_generator"]
)
def test_vllms_methods_take_the_conversation(name: str) -> None:
    method = inspect.unwrap(getattr(OpenAIServingChat, name))
    assert "conversation" in inspect.signature(method).parameters

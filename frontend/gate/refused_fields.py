"""Fields of a request that vLLM's server would leave out without a word, though they change what is
asked: each is refused with a sentence that says what to send instead.

That server takes any field that it does not know, since clients send many. Those that only hint
(``verbosity``, ``prediction``, ``metadata`` …) go on being ignored: docs/clients.md has both lists.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from common.errors import RequestRejectedError
from frontend.gate.message_blocks import refused_in_messages
from frontend.gate.refusal import Fields, Refusal, kind_of, objects

Check: TypeAlias = Callable[[Fields, bool], Iterator[Refusal]]

_NOT_STORED: Final = (
    "answers are not stored here. Send the whole conversation in `input`: OpenAI's SDKs and "
    "Vercel's AI SDK do so with `store: false`"
)
_RUNS_ITSELF: Final = frozenset({"code_interpreter", "container", "mcp", "web_search_preview"})
_OF_CLIENTS: Final = frozenset({"custom", "function", "namespace"})


class RefusedFieldError(RequestRejectedError):
    """A field asks for what nothing here does.

    Attributes:
        field: where it is in the body.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.words)
        self.field = refusal.field


def check(path: str, body: object, *, runs_tools: bool) -> None:
    """Look at the body of a request before vLLM does.

    Args:
        path: of the route; those below it, such as ``/render``, take the same.
        runs_tools: whether the server runs tools itself (``--tool-server``).

    Raises:
        RefusedFieldError: with the first field that is refused.
    """
    if isinstance(body, dict):
        for start, find in _CHECKS.items():
            if path.startswith(start):
                for refusal in find(body, runs_tools):
                    raise RefusedFieldError(refusal)


def _of_chat(body: Fields, _: bool) -> Iterator[Refusal]:
    for field, (wrong, words) in _CHAT.items():
        if wrong(body.get(field)):
            yield Refusal(field, words)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    # In a batch each is a list of messages.
    for conversation in (messages, *(each for each in messages if isinstance(each, list))):
        for n, message in objects(conversation):
            yield from _of_message(f"messages.{n}", message)


def _of_message(place: str, message: Fields) -> Iterator[Refusal]:
    if message.get("function_call"):
        words = "`function_call` is the older form of `tool_calls`: send that"
        yield Refusal(f"{place}.function_call", words)
    if message.get("audio"):
        words = "no sound of an earlier answer is kept here: send what was said as text"
        yield Refusal(f"{place}.audio", words)


def _of_responses(body: Fields, runs_tools: bool) -> Iterator[Refusal]:
    if body.get("conversation"):
        words = f"`conversation` names none that is here: {_NOT_STORED}"
        yield Refusal("conversation", words)
    for field in ("previous_response_id", "background"):
        if body.get(field):
            yield Refusal(field, f"`{field}` needs stored answers, and {_NOT_STORED}")
    yield from _of_tools(body.get("tools"), runs_tools)
    for n, item in objects(body.get("input")):
        yield from _of_item(f"input.{n}", item)


def _of_tools(tools: object, runs_tools: bool) -> Iterator[Refusal]:
    taken = _OF_CLIENTS | _RUNS_ITSELF if runs_tools else _OF_CLIENTS
    for n, tool in objects(tools):
        kind = kind_of(tool)
        if kind not in taken:
            words = (
                f"a tool of type {kind!r} is run by OpenAI's servers, and nothing here runs it: "
                "describe one of type `function` and run it yourself"
            )
            yield Refusal(f"tools.{n}.type", words)


def _of_item(place: str, item: Fields) -> Iterator[Refusal]:
    if item.get("type") == "item_reference":
        yield Refusal(place, f"an `item_reference` needs stored answers, and {_NOT_STORED}")
    content = item.get("content")
    if item.get("role") != "assistant" or not isinstance(content, list):
        return
    if len(content) > 1:
        words = "of a message of the assistant one part is read: join the texts of this one"
        yield Refusal(f"{place}.content", words)
    for n, part in objects(content):
        if part.get("type") == "refusal":
            words = "what the assistant refused is read as text: send it as `output_text`"
            yield Refusal(f"{place}.content.{n}", words)


_CHAT: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "functions": (bool, "`functions` is the older form of `tools`: send that"),
    "function_call": (
        lambda value: value not in (None, "none", "auto"),
        "`function_call` is the older form of `tool_choice`: send that",
    ),
    "audio": (bool, "no model here answers in sound: leave `audio` out"),
    "modalities": (
        lambda value: isinstance(value, list) and "audio" in value,
        'no model here answers in sound: leave `modalities` out, or send ["text"]',
    ),
    "web_search_options": (bool, "nothing here searches the web: leave `web_search_options` out"),
}
"""Field -> whether a value asks for something, and what is said then."""

_CHECKS: Final[Mapping[str, Check]] = {
    "/v1/chat/completions": _of_chat,
    "/invocations": _of_chat,
    "/v1/responses": _of_responses,
    "/v1/messages": lambda body, _: refused_in_messages(body),
}
"""By the beginning of a path."""

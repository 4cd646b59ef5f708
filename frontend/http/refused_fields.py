"""Fields of a request that vLLM's server would leave out without a word, though they change what is
asked: each is refused with a sentence that says what to send instead.

That server takes any field that it does not know, since clients send many. Those that only hint
(``verbosity``, ``prediction``, ``metadata`` …) go on being ignored: docs/clients.md has both lists.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partialmethod
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from fastapi import HTTPException, Request
from starlette.responses import Response

from frontend.asgi import error_answer, route_path
from frontend.http.message_blocks import refused_in_messages
from frontend.http.refusal import Fields, Refusal, kind_of, objects

Check: TypeAlias = Callable[[Fields, "Abilities"], Iterator[Refusal]]

_NOT_STORED: Final = (
    "answers are not stored here. Send the whole conversation in `input`: OpenAI's SDKs and "
    "Vercel's AI SDK do so with `store: false`"
)
_RUNS_ITSELF: Final = frozenset({"code_interpreter", "container", "mcp", "web_search_preview"})
_OF_CLIENTS: Final = frozenset({"custom", "function", "namespace"})


@dataclass(frozen=True)
class Abilities:
    """What a server can do that depends on how it was started.

    Attributes:
        runs_tools: whether it runs tools itself (``--tool-server``).
    """

    runs_tools: bool = False

    @classmethod
    def of(cls, request: Request) -> "Abilities":
        """Ask vLLM's app."""
        return cls(runs_tools=bool(request.app.state.args.tool_server))


class RefusedFieldError(HTTPException):
    """A field can't be served. FastAPI lets no other kind of error through from where bodies are
    read.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, refusal.words)
        self.field = refusal.field


async def answer_refused(request: Request, error: Exception) -> Response:
    """Answer a request with such a field, as a handler of FastAPI's."""
    if not isinstance(error, RefusedFieldError):
        raise error
    status = HTTPStatus.BAD_REQUEST
    return error_answer(error.detail, status, kind="BadRequestError", param=error.field)


def install() -> None:
    """Let all apps of this process look at their requests so, whatever parses them by now."""
    Request.json = partialmethod(_checked, Request.json)  # type: ignore[assignment, method-assign]


async def _checked(self: Request, read: Callable[[Request], Awaitable[Any]]) -> Any:
    body = await read(self)
    path = route_path(self.scope, self.app.root_path or "")
    check(path, body, Abilities.of(self))
    return body


def check(path: str, body: object, abilities: Abilities) -> None:
    """Look at the body of a request before vLLM does.

    Args:
        path: of the route; those below it, such as ``/render``, take the same.

    Raises:
        RefusedFieldError: with the first field that is refused.
    """
    if isinstance(body, dict):
        for start, find in _CHECKS.items():
            if path.startswith(start):
                for refusal in find(body, abilities):
                    raise RefusedFieldError(refusal)


def _of_chat(body: Fields, _: Abilities) -> Iterator[Refusal]:
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


def _of_responses(body: Fields, abilities: Abilities) -> Iterator[Refusal]:
    if body.get("conversation"):
        words = f"`conversation` names none that is here: {_NOT_STORED}"
        yield Refusal("conversation", words)
    for field in ("previous_response_id", "background"):
        if body.get(field):
            yield Refusal(field, f"`{field}` needs stored answers, and {_NOT_STORED}")
    yield from _of_tools(body.get("tools"), abilities)
    for n, item in objects(body.get("input")):
        yield from _of_item(f"input.{n}", item)


def _of_tools(tools: object, abilities: Abilities) -> Iterator[Refusal]:
    taken = _OF_CLIENTS | _RUNS_ITSELF if abilities.runs_tools else _OF_CLIENTS
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
    if item.get("role") == "assistant" and isinstance(content, list) and len(content) > 1:
        words = "of a message of the assistant one part is read: join the texts of this one"
        yield Refusal(f"{place}.content", words)


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

"""Refuse fields that vLLM's server would ignore although they change what is asked, with a sentence
that says what to send instead.

vLLM ignores all unknown fields, since clients send many. Hints (``verbosity``, ``prediction``,
``metadata`` …) stay ignored: docs/clients.md has both lists. So do two things of ``/v1/messages``:
``redacted_thinking``, which is encrypted and which clients return, and texts that begin with
``x-anthropic-billing-header``, which change each time.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from common.errors import RequestRejectedError

Fields: TypeAlias = Mapping[str, Any]
"""A JSON object."""


class Refusal(NamedTuple):
    """A refused field: its place, and the reason with what to send instead."""

    field: str
    words: str


def objects(value: object) -> Iterator[tuple[int, Fields]]:
    """Yield the objects of a list with their indices; nothing for other values."""
    if isinstance(value, list):
        yield from ((n, each) for n, each in enumerate(value) if isinstance(each, dict))


def kind_of(fields: Fields) -> str:
    """Return the ``type`` of an object, short enough for a sentence."""
    kind = fields.get("type")
    return kind[:64] if isinstance(kind, str) else f"({type(kind).__name__})"


Check: TypeAlias = Callable[[Fields, bool], Iterator[Refusal]]

_NOT_STORED: Final = (
    "answers are not stored here. Send the whole conversation in `input`: OpenAI's SDKs and "
    "Vercel's AI SDK do so with `store: false`"
)
_RUNS_ITSELF: Final = frozenset({"code_interpreter", "container", "mcp", "web_search_preview"})
_OF_CLIENTS: Final = frozenset({"custom", "function", "namespace"})


class RefusedFieldError(RequestRejectedError):
    """A field asks for something that nothing here does; ``field`` is its place in the body."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.words)
        self.field = refusal.field


def check(path: str, body: object, *, runs_tools: bool) -> None:
    """Raise RefusedFieldError for the first refused field. Sub-paths (``/render``) count too."""
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
"""Field -> whether a value asks for something, and the answer then."""

_CHECKS: Final[Mapping[str, Check]] = {
    "/v1/chat/completions": _of_chat,
    "/invocations": _of_chat,
    "/v1/responses": _of_responses,
    "/v1/messages": lambda body, _: refused_in_messages(body),
}
"""By the beginning of a path."""

_TOP: Final = {
    "mcp_servers": "no MCP server is asked from here: list its tools in `tools` and run them",
    "container": "there are no containers here: leave `container` out",
    "output_format": "`output_format` is the older name of `output_config.format`: send that",
}
_TAKEN: Final = frozenset(
    {
        "image",
        "redacted_thinking",
        "text",
        "thinking",
        "tool_addition",
        "tool_reference",
        "tool_removal",
        "tool_result",
        "tool_use",
    }
)
_OF_SYSTEM: Final = frozenset({"text", "tool_addition", "tool_removal"})
_OF_RESULTS: Final = frozenset({"image", "text", "tool_reference"})
_ONLY_IN: Final = {"thinking": "assistant", "tool_result": "user", "tool_use": "assistant"}


def refused_in_messages(body: Fields) -> Iterator[Refusal]:
    """Yield what vLLM would drop of a request."""
    for field, words in _TOP.items():
        if body.get(field):
            yield Refusal(field, words)
    for n, tool in objects(body.get("tools")):
        if tool.get("type") not in (None, "custom"):
            yield Refusal(
                f"tools.{n}.type",
                f"tools of type {kind_of(tool)!r} are Anthropic's own, and nothing here knows "
                "them: describe the tool with `name`, `description` and `input_schema`",
            )
    for n, block in objects(body.get("system")):
        yield from _not_text(f"system.{n}", block, frozenset({"text"}))
    for n, message in objects(body.get("messages")):
        for m, block in objects(message.get("content")):
            yield from _of_block(f"messages.{n}.content.{m}", block, message.get("role"))


def _of_block(place: str, block: Fields, role: object) -> Iterator[Refusal]:
    kind = kind_of(block)
    if role == "system":
        yield from _not_text(place, block, _OF_SYSTEM)
    elif kind not in _TAKEN:
        yield _unknown(place, kind, _TAKEN)
    elif kind == "tool_reference":
        yield Refusal(place, "a `tool_reference` is read inside a `tool_result` only")
    elif role != _ONLY_IN.get(kind, role):
        yield Refusal(place, f"a `{kind}` is read in messages of role `{_ONLY_IN[kind]}` only")
    elif kind == "tool_result":
        for n, inner in objects(block.get("content")):
            yield from _of_result(f"{place}.content.{n}", inner)
    else:
        yield from _empty(place, block)


def _of_result(place: str, block: Fields) -> Iterator[Refusal]:
    kind = kind_of(block)
    if kind not in _OF_RESULTS:
        yield _unknown(place, kind, _OF_RESULTS, "a `tool_result`")
    elif kind == "tool_reference":
        if not (block.get("tool_name") or block.get("name")):
            yield Refusal(place, "a `tool_reference` needs the `tool_name` that it is about")
    else:
        yield from _empty(place, block)


def _not_text(place: str, block: Fields, taken: frozenset[str]) -> Iterator[Refusal]:
    kind = kind_of(block)
    if kind not in taken:
        yield _unknown(place, kind, taken, "the system prompt")
    else:
        yield from _empty(place, block)


def _empty(place: str, block: Fields) -> Iterator[Refusal]:
    """Yield a refusal if a block has nothing where its content should be."""
    kind = kind_of(block)
    if kind == "image":
        yield from _of_source(f"{place}.source", block.get("source"))
    elif kind in ("text", "thinking") and not isinstance(block.get(kind), str):
        yield Refusal(place, f"a `{kind}` block needs its text in `{kind}`")


def _of_source(place: str, source: object) -> Iterator[Refusal]:
    fields = source if isinstance(source, dict) else {}
    kind = kind_of({"type": "base64", **fields})
    if kind not in ("base64", "url"):
        yield Refusal(
            place,
            f"images from a source of type {kind!r} are not here: send them in base64 or by url",
        )
    needed = "url" if kind == "url" else "data"
    if kind in ("base64", "url") and not (fields.get(needed) and isinstance(fields[needed], str)):
        yield Refusal(place, f"an image needs a `source` with `{needed}`: this one has none")


def _unknown(place: str, kind: str, taken: frozenset[str], where: str = "a message") -> Refusal:
    listed = ", ".join(sorted(taken))
    remedy = ": send the document's text, or its pages as images" if kind == "document" else ""
    return Refusal(
        place, f"blocks of type {kind!r} can't be read in {where}, which may have {listed}{remedy}"
    )

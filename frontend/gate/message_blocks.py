"""Blocks and fields of ``/v1/messages`` that vLLM would drop and answer 200.

``redacted_thinking`` is left out by intent: it is encrypted, and clients send back whatever an
answer had. So are texts that begin with ``x-anthropic-billing-header``, which change each time.
"""

from collections.abc import Iterator
from typing import Final

from frontend.gate.refusal import Fields, Refusal, kind_of, objects

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
    """Yield what would be dropped of a request."""
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
    """What has nothing where its content should be."""
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

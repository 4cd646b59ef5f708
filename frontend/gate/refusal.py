"""What is wrong with a field of a request."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

Fields: TypeAlias = Mapping[str, Any]
"""An object of JSON."""


class Refusal(NamedTuple):
    """A field that is refused.

    Attributes:
        field: where it is.
        words: why, and what to send instead.
    """

    field: str
    words: str


def objects(value: object) -> Iterator[tuple[int, Fields]]:
    """Yield the objects of what may be a list, with their places."""
    if isinstance(value, list):
        yield from ((n, each) for n, each in enumerate(value) if isinstance(each, dict))


def kind_of(fields: Fields) -> str:
    """Return what an object says that it is, short enough for a sentence."""
    kind = fields.get("type")
    return kind[:64] if isinstance(kind, str) else f"({type(kind).__name__})"

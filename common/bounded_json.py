"""Validate JSON of peers at a bounded cost.

Pydantic makes an error of every wrong member: 1.2 MB of ``{}`` on a card took 17 s without a turn
for other threads, and the text of a million errors has 180 MB.
"""

from typing import Final, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

_Model = TypeVar("_Model")

MAX_PLACE_LEN: Final = 128
"""Characters of the name of a wrong field, which its author chooses."""


class MalformedJsonError(ValueError):
    """The first fault and its place, on one short line."""


class JsonLimits(NamedTuple):
    """Maximum size of a JSON text, in bytes and in commas; commas count its members."""

    most_bytes: int
    most_commas: int

    def read(self, adapter: TypeAdapter[_Model], data: bytes | memoryview) -> _Model:
        """Validate a text. Raises MalformedJsonError."""
        content = bytes(data)
        if len(content) > self.most_bytes:
            raise MalformedJsonError(
                f"it has {len(content)} bytes, and may have {self.most_bytes} at most"
            )
        if content.count(b",") > self.most_commas:
            raise MalformedJsonError(f"it has more than {self.most_commas} members")
        try:
            return adapter.validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise MalformedJsonError(f"{_place(first['loc'])}{first['msg']}") from None


def _place(loc: tuple[int | str, ...]) -> str:
    whole = ".".join(map(str, loc))
    short = whole[:MAX_PLACE_LEN]
    if not whole:
        return ""
    return f"{whole}: " if short == whole and whole.isprintable() else f"{short!r}: "

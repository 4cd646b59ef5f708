"""A name for a key that is equal in all processes, as its hash is not."""

from collections.abc import Hashable

from blake3 import blake3


def key_name(key: Hashable) -> bytes | None:
    """32 bytes, None for a key that is like no other in any process."""
    try:
        return blake3(_text(key).encode("utf-8", "surrogatepass")).digest()
    except TypeError:
        return None


def _text(value: object) -> str:
    # A set has no order that two processes share.
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(_text, value))) + "}"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_text, value)) + ")"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    raise TypeError(f"{value!r} has no name")

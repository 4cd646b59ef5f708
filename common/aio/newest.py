"""Tables that keep what was put into them last."""

from collections.abc import Hashable, MutableMapping
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def keep_newest(table: MutableMapping[_Key, _Value], key: _Key, value: _Value, most: int) -> None:
    """Put an entry into a table as its newest, and let go of the oldest beyond so many.

    Args:
        table: in the order in which its entries came.
        most: entries that stay, at least 1.
    """
    table.pop(key, None)
    table[key] = value
    while len(table) > most:
        del table[next(iter(table))]

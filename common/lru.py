"""Bounded LRU dict."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Map keys to values within a budget, evicting the least recently used entries first. Values
    are not None. Not thread-safe. ``weight`` is the total of all entries."""

    def __init__(self, budget: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        """``budget`` limits the total weight. ``weigh`` must be constant per value."""
        self.weight = 0
        self._budget = budget
        self._weigh = weigh
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """Iterate over keys, the least recently used first."""
        return iter(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """Return the value of a key and mark it as used; None if it is missing."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def peek(self, key: K) -> V | None:
        """Return the value of a key without marking it as used; None if it is missing."""
        return self._entries.get(key)

    def put(self, key: K, value: V) -> list[V]:
        """Set a value and evict entries over the budget; return the evicted values. A value heavier
        than the budget is not stored and evicts nothing."""
        self.pop(key)
        added = self._weigh(value)
        if added > self._budget:
            return []
        self._entries[key] = value
        self.weight += added
        return self.shrink(self._budget)

    def pop(self, key: K) -> V | None:
        """Remove a key; return its value, None if it is missing."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.weight -= self._weigh(value)
        return value

    def shrink(self, budget: int) -> list[V]:
        """Evict the least recently used entries down to a total weight; return their values."""
        evicted = []
        while self.weight > budget:
            _, value = self._entries.popitem(last=False)
            self.weight -= self._weigh(value)
            evicted.append(value)
        return evicted

    def clear(self) -> None:
        self._entries.clear()
        self.weight = 0

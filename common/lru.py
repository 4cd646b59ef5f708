"""Bounded LRU dict."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Map keys to values within a budget; the least recently used entries are evicted first.

    Values are not None. Not for several threads at once.

    Attributes:
        weight: of all entries together.
    """

    def __init__(self, budget: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        """
        Args:
            budget: largest weight of all entries together.
            weigh: weight of a value, the same each time; without it ``budget`` counts entries.
        """
        self.weight = 0
        self._budget = budget
        self._weigh = weigh
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """Keys, the least recently used first."""
        return iter(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """Return the value of a key and mark it as used, None if it is not there."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def peek(self, key: K) -> V | None:
        """Return the value of a key without marking it as used, None if it is not there."""
        return self._entries.get(key)

    def put(self, key: K, value: V) -> list[V]:
        """Set the value of a key and evict what is over the budget; return the evicted values.

        A value heavier than the budget is not kept, and costs no other entry its place.
        """
        self.pop(key)
        added = self._weigh(value)
        if added > self._budget:
            return []
        self._entries[key] = value
        self.weight += added
        return self.shrink(self._budget)

    def pop(self, key: K) -> V | None:
        """Remove a key; its value, None if it was not there."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.weight -= self._weigh(value)
        return value

    def shrink(self, budget: int) -> list[V]:
        """Evict the least recently used until a weight is left; return the evicted values."""
        evicted = []
        while self.weight > budget:
            _, value = self._entries.popitem(last=False)
            self.weight -= self._weigh(value)
            evicted.append(value)
        return evicted

    def clear(self) -> None:
        self._entries.clear()
        self.weight = 0

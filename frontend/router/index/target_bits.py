"""Bit positions of targets, so that a set of targets is one integer.

A slot is a bit position. A target owns one slot per KV cache group in which all of a prompt's
blocks must be found.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import compress

from common.identity import Target

_ANY_GROUP = -1
"""Group of a slot until the first event names its group."""

_DIGITS = bytes.maketrans(b"01", b"\0\1")


class TargetBits:
    """Allocator of slots for pairs of target and group.

    A target that loses all its blocks at once gets new slots in constant time; the old ones are
    reused when every table has swept them.
    """

    def __init__(self) -> None:
        self.live = 0
        """Slots of registered targets, as a mask."""
        self.grouped = 0
        """Slots of targets with more than one slot, as a mask."""
        self._slots: dict[Target, dict[int, int]] = {}
        self._epochs: dict[Target, int] = {}
        self._epoch = 0
        self._owners: list[Target] = []
        self._free: list[int] = []
        self._unswept: dict[int, int] = {}
        self._retire: list[Callable[[int], bool]] = []

    def __contains__(self, target: Target) -> bool:
        return target in self._slots

    def __len__(self) -> int:
        """Return the width of masks in bits: the most slots ever in use at once."""
        return len(self._owners)

    def add_user(self, retire: Callable[[int], bool]) -> None:
        """Add a table keyed by slots, which must forget a slot before its reuse.

        ``retire`` returns whether a slot held nothing, so that it is free at once. Otherwise the
        table calls :meth:`swept` when it has forgotten the slot.
        """
        self._retire.append(retire)

    def targets(self) -> list[Target]:
        return list(self._slots)

    def open(self, target: Target) -> None:
        if target not in self._slots:
            self._slots[target] = {_ANY_GROUP: self._take(target)}
            self._epoch += 1
            self._epochs[target] = self._epoch

    def epoch(self, target: Target) -> int:
        """Return a number that changes whenever the target's slots do; 0 if it is unknown."""
        return self._epochs.get(target, 0)

    def slot(self, target: Target, group: int) -> int:
        """Return the slot of a target's group, or a new one. Raises KeyError if not registered."""
        groups = self._slots[target]
        slot = groups.get(group)
        if slot is not None:
            return slot
        slot = groups.pop(_ANY_GROUP, None)
        if slot is None:
            slot = self._take(target)
        groups[group] = slot
        if len(groups) > 1:
            self.grouped |= self.mask(target)
        return slot

    def find(self, target: Target, group: int) -> int | None:
        return self._slots.get(target, {}).get(group)

    def mask(self, target: Target) -> int:
        mask = 0
        for slot in self._slots.get(target, {}).values():
            mask |= 1 << slot
        return mask

    def owner(self, slot: int) -> Target:
        if not self.live >> slot & 1:
            raise KeyError(slot)
        return self._owners[slot]

    def owners(self, mask: int) -> tuple[Target, ...]:
        """Return the targets whose live slots are in a mask, each once."""
        # Digits of the mask, lowest first, as zeros and ones: no loop in Python.
        chosen = bin(mask)[:1:-1].encode().translate(_DIGITS)
        owners = compress(self._owners, chosen)
        return tuple(dict.fromkeys(owners)) if mask & self.grouped else tuple(owners)

    def renew(self, target: Target) -> None:
        if target in self._slots:
            self.close(target)
            self.open(target)

    def close(self, target: Target) -> None:
        """Unregister a target and retire its slots. Unknown targets are ignored."""
        retired = self.mask(target)
        self.live &= ~retired
        self.grouped &= ~retired
        self._slots.pop(target, None)
        self._epochs.pop(target, None)
        for slot in bits(retired):
            busy = sum(not retire(slot) for retire in self._retire)
            if busy:
                self._unswept[slot] = busy
            else:
                heapq.heappush(self._free, slot)

    def swept(self, slot: int) -> None:
        self._unswept[slot] -= 1
        if not self._unswept[slot]:
            del self._unswept[slot]
            heapq.heappush(self._free, slot)

    def _take(self, target: Target) -> int:
        # Lowest first, since the width of every mask is that of the highest slot.
        if self._free:
            slot = heapq.heappop(self._free)
            self._owners[slot] = target
        else:
            slot = len(self._owners)
            self._owners.append(target)
        self.live |= 1 << slot
        return slot


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the ones of a non-negative integer, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low

"""Slots are unique while in use and given out again only when every table is done."""

import pytest

from common.identity import Target, WorkerId
from frontend.router.index.target_bits import TargetBits, bits

A, B = Target(WorkerId("a"), 0), Target(WorkerId("b"), 0)


class Table:
    """A table that is done with a slot when told."""

    def __init__(self, empty: bool) -> None:
        self.empty = empty

    def retire(self, slot: int) -> bool:
        return self.empty


def test_bits() -> None:
    assert list(bits(0)) == []
    assert list(bits(0b1010_0001 | 1 << 100)) == [0, 5, 7, 100]


def test_the_first_group_takes_the_slot_a_target_starts_with() -> None:
    slots = TargetBits()
    slots.open(A)
    before = slots.mask(A)
    assert 1 << slots.slot(A, 3) == before
    assert slots.grouped == 0
    slots.slot(A, 4)
    assert slots.mask(A).bit_count() == 2
    assert slots.grouped == slots.mask(A) == slots.live


def test_a_slot_waits_for_every_table() -> None:
    slots = TargetBits()
    busy, idle = Table(empty=False), Table(empty=True)
    for table in (busy, busy, idle):
        slots.add_user(table.retire)
    slots.open(A)
    slots.close(A)
    assert A not in slots
    slots.swept(0)
    slots.open(B)
    assert slots.mask(B) == 0b10
    slots.swept(0)
    slots.open(A)
    assert slots.mask(A) == 0b1


def test_renewing_changes_the_epoch_and_the_slots() -> None:
    slots = TargetBits()
    slots.add_user(Table(empty=False).retire)
    slots.open(A)
    epoch, mask = slots.epoch(A), slots.mask(A)
    slots.renew(A)
    assert slots.epoch(A) != epoch
    assert slots.mask(A) & mask == 0
    with pytest.raises(KeyError):
        slots.owner(0)
    assert slots.owner(1) == A


def test_unknown_targets_have_nothing() -> None:
    slots = TargetBits()
    slots.renew(A)
    slots.close(A)
    assert slots.mask(A) == slots.epoch(A) == len(slots) == 0
    with pytest.raises(KeyError):
        slots.slot(A, 0)

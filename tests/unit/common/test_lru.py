import random

import pytest

from common.lru import Lru


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    lru: Lru[str, int] = Lru(2)
    lru.put("a", 1)
    lru.put("b", 2)
    assert lru.get("a") == 1
    lru.put("c", 3)
    assert [key for key in "abc" if key in lru] == ["a", "c"]
    lru.put("a", 4)
    lru.put("d", 5)
    assert [lru.get(key) for key in "abcd"] == [4, None, None, 5]


def test_a_peek_is_no_use() -> None:
    lru: Lru[str, int] = Lru(2)
    lru.put("a", 1)
    lru.put("b", 2)
    assert lru.peek("a") == 1 and lru.peek("z") is None
    lru.put("c", 3)
    assert "a" not in lru and len(lru) == 2


def test_a_value_that_is_too_heavy_evicts_nothing_but_what_it_replaces() -> None:
    lru: Lru[str, bytes] = Lru(10, len)
    lru.put("a", b"1234")
    lru.put("b", b"1234")
    lru.put("c", bytes(11))
    assert "c" not in lru and lru.weight == 8
    lru.put("b", bytes(11))
    assert lru.peek("a") == b"1234" and lru.peek("b") is None and lru.weight == 4


def test_what_is_shrunk_away_comes_back_in_order() -> None:
    lru: Lru[str, bytes] = Lru(10, len)
    for key in "abc":
        lru.put(key, key.encode() * 3)
    lru.get("a")
    assert lru.shrink(3) == [b"bbb", b"ccc"]
    assert lru.shrink(3) == []
    assert lru.pop("a") == b"aaa" and lru.pop("a") is None and lru.weight == 0


@pytest.mark.parametrize("budget", [0, 1, 17])
def test_the_weight_is_that_of_the_entries_whatever_is_done(budget: int) -> None:
    chance, lru = random.Random(budget), Lru[int, bytes](budget, len)
    for _ in range(2000):
        key = chance.randrange(8)
        match chance.randrange(5):
            case 0:
                lru.pop(key)
            case 1:
                lru.get(key)
            case 2 if chance.random() < 0.1:
                lru.clear()
            case _:
                lru.put(key, bytes(chance.randrange(1, 20)))
        held = [value for each in range(8) if (value := lru.peek(each)) is not None]
        assert lru.weight == sum(map(len, held)) <= budget
        assert len(lru) == len(held)

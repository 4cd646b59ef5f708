"""So much for all requests together: taken before, given back on every way out."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from common.errors import OverloadedError
from frontend.media_limits import budget as budgets
from frontend.media_limits.budget import MIB, Budget, Copies, MediaBudgets
from frontend.media_limits.policy import FetchPolicy, RefusedError
from tests.waiting import until


class Owner:
    pass


def budget(total: int = 100) -> Budget:
    return Budget(total, 1, "things")


def test_what_is_left_is_told_from_what_never_was() -> None:
    things = budget()
    held = things.reserve(60)
    with pytest.raises(OverloadedError, match="take up all 100 things"):
        things.reserve(41)
    with pytest.raises(RefusedError, match="more than 100 things"):
        things.reserve(101)
    with pytest.raises(RefusedError):
        held.grow(41)
    assert things.reserved == 60
    things.reserve(40).release()
    held.release()
    held.release()
    assert things.reserved == 0
    things.reserve(100).release()


def test_one_client_leaves_some_to_others() -> None:
    things = Budget(100, 1, "things", of_one=80)
    held = things.reserve(50, "a")
    with pytest.raises(OverloadedError, match="this client has its share of all 100 things"):
        things.reserve(31, "a")
    with pytest.raises(OverloadedError, match="take up all 100 things"):
        things.reserve(51, "b")
    owner = Owner()
    held.moved_to(owner).grow(30)
    things.reserve(20, "b").release()
    del owner, held
    things.reserve(80, "a").release()
    assert (things.reserved, things._clients) == (0, {})


def test_the_share_of_a_client_has_room_for_one_request() -> None:
    for of_request, most in ((400, 700), (750, 750)):
        policy = FetchPolicy(max_request_mb=of_request, held_mb=800)
        held = MediaBudgets.of(policy).held
        held.reserve(most * MIB, "a").release()
        with pytest.raises(OverloadedError):
            held.reserve(most * MIB + 1, "a")


def test_units_are_the_readers() -> None:
    with pytest.raises(RefusedError, match=r"more than 2.5 MiB"):
        Budget(5 * MIB // 2, MIB, "MiB").reserve(3 * MIB)


def test_it_is_given_back_when_nobody_has_it_any_more() -> None:
    things = budget()
    reservation = things.reserve(10)
    assert things.reserved == 10
    del reservation
    assert things.reserved == 0


def test_it_lasts_as_long_as_what_it_is_kept_with() -> None:
    things = budget()
    owner, other = Owner(), Owner()
    things.reserve(10).keep_with(owner)
    with things.reserve(20) as reservation:
        reservation.moved_to(other)
    assert things.reserved == 30
    del owner
    assert things.reserved == 20
    del other
    assert things.reserved == 0


def test_an_error_gives_it_back() -> None:
    things = budget()
    with pytest.raises(KeyError), things.reserve(10):
        raise KeyError
    assert things.reserved == 0


def test_the_garbage_collector_may_give_back_at_any_moment() -> None:
    """In a thread that is about to take, for example."""
    things = budget(1_000_000)

    def take_and_lose() -> None:
        for _ in range(300):
            cycle = [things.reserve(1)]
            cycle.append(cycle)  # type: ignore[arg-type] # on purpose
            del cycle
            gc.collect(0)
            things.reserve(2).release()

    threads = [threading.Thread(target=take_and_lose) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert things.reserved == 0


async def test_copies_are_had_in_the_order_of_asking() -> None:
    """A large share is not passed by small ones for ever."""
    copies = Copies(10)
    order: list[int] = []

    def take(amount: int) -> None:
        with copies.share(amount):
            order.append(amount)

    with ThreadPoolExecutor(3) as pool, copies.share(8):
        for asked, amount in enumerate((9, 1, 2), start=1):
            pool.submit(take, amount)
            await until(partial(lambda asked: len(copies._waiting) == asked, asked))
        assert order == []
    assert order[0] == 9
    assert sorted(order) == [1, 2, 9]


def test_one_alone_has_all_the_copies_that_it_needs() -> None:
    copies = Copies(10)
    with copies.share(25):
        pass
    with pytest.raises(ZeroDivisionError), copies.share(25):
        raise ZeroDivisionError
    with copies.share(10):
        pass


def test_copies_that_do_not_come_back_are_waited_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "COPIES_WAIT_S", 0.01)
    copies = Copies(10)
    with copies.share(10), pytest.raises(OverloadedError, match="too many large"), copies.share(1):
        pass
    with copies.share(10):
        pass

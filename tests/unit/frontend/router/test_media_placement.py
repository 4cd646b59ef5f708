"""What workers acknowledged is relied on; what is on its way only attracts."""

from common.identity import MmHash, WorkerId
from frontend.router.selection.media_placement import MediaPlacement

A, B = WorkerId("a"), WorkerId("b")
X, Y, Z = MmHash("x"), MmHash("y"), MmHash("z")


def placement(capacity: int = 100, expect_s: float = 5.0) -> MediaPlacement:
    """Of two workers."""
    made = MediaPlacement(capacity, expect_s)
    for worker_id in (A, B):
        made.add(worker_id)
    return made


def test_acks_and_nacks() -> None:
    media = placement()
    media.acked(A, [X, Y])
    media.acked(B, [X])
    assert media.holds(A, X)
    assert media.holders(X, 0.0) == {A, B}
    media.nacked(A, [X, Z])
    assert not media.holds(A, X)
    assert media.holders(X, 0.0) == {B}


def test_an_item_on_its_way_attracts_but_is_not_relied_on() -> None:
    media = placement(expect_s=5.0)
    media.expect(A, [X], now=0.0)
    assert media.holders(X, 4.0) == {A}
    assert not media.holds(A, X)
    assert media.holders(X, 5.0) == set()
    media.acked(A, [X])
    assert media.holders(X, 99.0) == {A}
    assert len(media._ages) == 0


def test_an_item_already_held_is_not_expected() -> None:
    media = placement()
    media.acked(A, [X])
    media.expect(A, [X], now=0.0)
    assert len(media._ages) == 0


def test_what_expired_is_forgotten_with_the_next_expectation() -> None:
    media = placement(expect_s=1.0)
    media.expect(A, [X, Y], now=0.0)
    media.expect(A, [Z], now=2.0)
    assert len(media._ages) == 1


def test_the_least_recently_used_item_makes_way() -> None:
    media = placement(capacity=2)
    media.acked(A, [X, Y])
    media.touch(A, [X, Z])
    media.acked(A, [Z])
    assert [media.holds(A, item) for item in (X, Y, Z)] == [True, False, True]
    media.expect(B, [X, Y, Z], now=0.0)
    assert len(media._ages) == 2
    assert media.holders(X, 0.0) == {A}


def test_who_is_not_registered_holds_nothing() -> None:
    media = MediaPlacement()
    media.acked(A, [X])
    assert not media.holds(A, X)
    media.add(A)
    media.drop(A)
    media.acked(A, [X])
    assert not media.holds(A, X)
    assert (media._workers, media._ages, media._expected) == ({}, {}, {})


def test_a_dropped_worker_leaves_nothing_behind() -> None:
    media = placement()
    media.acked(A, [X])
    media.expect(A, [Y], now=0.0)
    media.drop(A)
    media.drop(B)
    assert (media._workers, media._ages, media._expected) == ({}, {}, {})
    assert media.holders(X, 0.0) == set()

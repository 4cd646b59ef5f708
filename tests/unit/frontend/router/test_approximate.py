"""Predictions live as long as they should, take no more room than allowed, and leave."""

from common.identity import BlockHash, RequestId, Target, WorkerId
from frontend.router.index.predictions import Predictions
from frontend.router.index.target_bits import TargetBits
from tests.fakes.kv_events import blocks

A, B = Target(WorkerId("a"), 0), Target(WorkerId("b"), 0)


def predictions(max_blocks: int = 100) -> tuple[Predictions, TargetBits]:
    slots = TargetBits()
    for target in (A, B):
        slots.open(target)
    return Predictions(slots, max_blocks), slots


def predict(
    store: Predictions, name: str, target: Target, hashes: list[BlockHash], lifetime_s: float = 5.0
) -> None:
    store.predict(RequestId(name), target, hashes, lifetime_s, now=0.0)


def test_predicted_blocks_match_until_they_expire() -> None:
    store, _ = predictions()
    predict(store, "1", A, blocks(1, 2))
    assert store.index.match(blocks(1, 2, 3)) == {A: 2}
    assert not store.expire(4.9, 10)
    assert store.index.match(blocks(1)) == {A: 1}
    assert not store.expire(5.0, 10)
    assert store.index.match(blocks(1)) == {}
    assert (len(store), store.blocks) == (0, 0)


def test_a_block_stays_while_any_request_predicts_it() -> None:
    store, _ = predictions()
    predict(store, "1", A, blocks(1, 2))
    predict(store, "2", A, blocks(1))
    store.forget(RequestId("1"))
    assert store.index.match(blocks(1, 2)) == {A: 1}
    store.forget(RequestId("2"))
    store.forget(RequestId("2"))
    assert store.index.match(blocks(1)) == {}


def test_a_request_that_moves_is_predicted_where_it_went() -> None:
    store, _ = predictions()
    predict(store, "1", A, blocks(1))
    predict(store, "1", B, blocks(1))
    assert store.index.match(blocks(1)) == {B: 1}
    assert store.blocks == 1


def test_for_lack_of_room_those_go_that_would_expire_first() -> None:
    store, _ = predictions(max_blocks=4)
    predict(store, "long", A, blocks(1, 2), lifetime_s=100.0)
    predict(store, "short", A, blocks(3, 4), lifetime_s=1.0)
    predict(store, "new", B, blocks(5))
    assert store.index.match(blocks(3)) == {}
    assert store.index.match(blocks(1)) == {A: 1}
    predict(store, "huge", B, blocks(*range(10, 20)))
    assert store.index.match(blocks(10)) == {}
    assert store.blocks == 3


def test_an_eviction_ends_every_prediction_of_the_block() -> None:
    store, _ = predictions()
    predict(store, "1", A, blocks(1, 2))
    predict(store, "2", A, blocks(1, 2))
    store.evicted(A, blocks(2, 9))
    assert store.index.match(blocks(1, 2)) == {A: 1}
    store.forget(RequestId("1"))
    assert store.index.match(blocks(1)) == {A: 1}


def test_predictions_for_slots_given_up_are_not_taken_back_from_their_successors() -> None:
    store, slots = predictions()
    predict(store, "old", A, blocks(1))
    slots.renew(A)
    assert store.index.match(blocks(1)) == {}
    predict(store, "new", A, blocks(1))
    store.forget(RequestId("old"))
    assert store.index.match(blocks(1)) == {A: 1}
    slots.close(A)
    predict(store, "gone", A, blocks(1))
    assert store.index.match(blocks(1)) == {}


def test_blocks_of_windows_are_predicted_and_forgotten_with_the_rest() -> None:
    store, slots = predictions(max_blocks=5)
    store.predict(RequestId("1"), A, blocks(1, 2), 5.0, 0.0, {1: blocks(2)})
    store.predict(RequestId("2"), A, blocks(), 5.0, 0.0, {1: blocks(2)})
    assert store.blocks == 4
    assert store.windows.holdings(A) == 1
    store.forget(RequestId("1"))
    assert store.windows.holdings(A) == 1
    slots.renew(A)
    store.windows.clear(A)
    predict(store, "3", A, blocks(2))
    store.predict(RequestId("4"), A, [], 5.0, 0.0, {1: blocks(2)})
    store.forget(RequestId("2"))  # of the slots before
    assert store.windows.holdings(A) == 1
    store.predict(RequestId("5"), A, blocks(7, 8, 9), 5.0, 0.0, {1: blocks(9)})
    assert store.blocks == 5


def test_nothing_is_left_behind() -> None:
    store, _ = predictions(max_blocks=50)
    for number in range(2000):
        store.predict(
            RequestId(str(number)), (A, B)[number % 2], blocks(number, number + 1), 3.0, number
        )
    while store.expire(1e9, 10):
        pass
    while store.index.sweep(1000):
        pass
    assert len(store) == store.blocks == 0
    assert len(store.index._chunks) == 0

"""What readers are answered who ask for batches, kept or not."""

from collections import deque
from collections.abc import Iterator

import pytest
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch

from backend_worker.kv_events import event_log
from backend_worker.kv_events.event_log import REPLAYED, EventLog, Message, retell
from backend_worker.kv_events.held_blocks import HeldBlocks
from frontend.router.event_wire import decode_batch
from tests.fakes.kv_events import cleared, encode, removed, stored


class Rank:
    """A log that is told what is published, and by the clock."""

    def __init__(self, buffer_steps: int) -> None:
        self.now = 100.0
        self._kept: deque[Message] = deque(maxlen=buffer_steps)
        self.log = EventLog(self._kept, lambda: self.now)
        self.number = 0

    def publish(self, *events: KVCacheEvent, lost: bool = False) -> None:
        number, self.number = self.number, self.number + 1
        payload = encode(list(events), time=float(number))
        if not lost:
            self._kept.append((number, payload))
        batch = KVEventBatch(ts=float(number), events=list(events))
        self.log.published(number, None if lost else payload, batch)

    def publish_many(self, count: int) -> None:
        for _ in range(count):
            self.publish(stored(self.number))

    def ask(self, start: int) -> list[Message]:
        """The answer, once it is there."""
        for _ in range(20_000):
            if (answer := self.log.answer(start)) is not None:
                return answer
            self.log.work()
        raise AssertionError("one snapshot after the other is made, and none is given")


def check_whole(answer: list[Message], rank: Rank) -> None:
    """It begins anew, has no gap, and ends with the newest batch itself."""
    numbers = [number for number, _ in answer]
    assert numbers == list(range(numbers[0], rank.number))
    assert decode_batch(answer[0][1]).begins_anew
    assert not any(decode_batch(payload).begins_anew for _, payload in answer[1:])
    assert decode_batch(answer[-1][1]).time == rank.number - 1


def test_what_is_kept_and_not_much_is_replayed_as_it_was() -> None:
    rank = Rank(1000)
    rank.publish_many(REPLAYED)
    assert [number for number, _ in rank.ask(0)] == list(range(REPLAYED))
    assert [number for number, _ in rank.ask(REPLAYED - 2)] == [REPLAYED - 2, REPLAYED - 1]
    assert rank.ask(REPLAYED) == []
    assert rank.ask(1 << 63) == []


def test_nothing_was_published() -> None:
    assert Rank(100).ask(0) == []


@pytest.mark.parametrize("start", [0, 1, 200])
def test_whoever_misses_more_is_told_all(start: int) -> None:
    rank = Rank(1000)
    rank.publish_many(5_000)
    answer = rank.ask(start)
    check_whole(answer, rank)
    assert answer[0][0] > start
    assert len(answer) < 10


@pytest.mark.parametrize("behind", [65, 66, 70, 120])
def test_numbers_of_a_snapshot_are_above_that_asked_for(
    behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_BLOCKS_PER_MESSAGE", 1)
    rank = Rank(64)
    for _ in range(3_000):
        rank.publish(stored(rank.number, lora_name=str(rank.number)))
    answer = rank.ask(rank.number - behind)
    check_whole(answer, rank)
    assert answer[0][0] > rank.number - behind


@pytest.mark.parametrize("copies", [2, 5])
def test_blocks_that_are_held_several_times_fit_below_the_next_number(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prompts with one beginning have them that are computed at the same time."""
    monkeypatch.setattr(event_log, "_BLOCKS_PER_MESSAGE", 1)
    rank = Rank(64)
    for number in range(70):
        for _ in range(copies):
            rank.publish(stored(number, lora_name=str(number)))
    rank.publish(stored(99, group_idx=1), removed(99, group_idx=1))  # a shelf without blocks
    rank.publish(stored(100))
    answer = rank.ask(rank.number - 66)
    check_whole(answer, rank)
    assert answer[0][0] > rank.number - 66


def test_what_is_published_while_a_snapshot_is_made_follows_it() -> None:
    rank = Rank(64)
    rank.publish_many(3_000)
    assert rank.log.answer(0) is None
    rank.publish_many(200)
    answer = rank.ask(0)
    check_whole(answer, rank)
    assert len(answer) > 200


def test_a_snapshot_is_made_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(held: HeldBlocks, last: KVEventBatch, blocks: int) -> Iterator[bytes]:
        made.append(last)
        return retell(held, last, blocks)

    monkeypatch.setattr(event_log, "retell", counted)
    rank = Rank(1000)
    rank.publish_many(2_000)
    for _ in range(50):
        rank.ask(0)
        rank.publish_many(1)
        check_whole(rank.ask(0), rank)
    rank.publish_many(60)
    rank.ask(0)
    assert len(made) == 1  # still fresh
    rank.now += 2.0
    check_whole(rank.ask(0), rank)
    assert len(made) == 2
    rank.now += 60.0
    rank.log.work()
    check_whole(rank.ask(0), rank)
    assert len(made) == 3


def test_a_batch_that_could_not_be_published_is_told_by_a_snapshot() -> None:
    rank = Rank(1000)
    rank.publish_many(10)
    rank.publish(removed(0), lost=True)
    rank.publish_many(1)
    answer = rank.ask(5)
    check_whole(answer, rank)
    assert answer[0][0] == 10  # the one that is missing
    rank.publish_many(2)
    assert [number for number, _ in rank.ask(11)] == [11, 12, 13]


def test_who_asks_while_a_snapshot_is_made_for_another_waits() -> None:
    rank = Rank(64)
    rank.publish_many(500)
    assert rank.log.answer(0) is None
    rank.publish_many(200)
    check_whole(rank.ask(600), rank)


@pytest.mark.parametrize("before", [0, 100])
def test_where_no_number_is_left_for_a_snapshot_what_is_kept_is_replayed(before: int) -> None:
    """For one that asks just for what could not be published."""
    rank = Rank(1000)
    rank.publish_many(before)
    rank.publish(stored(900), lost=True)
    rank.publish(stored(901))
    assert [number for number, _ in rank.ask(before)] == [before + 1]
    rank.publish(stored(902))
    check_whole(rank.ask(before), rank)


def test_a_batch_that_is_missing_last_of_all_leaves_no_gap_later() -> None:
    rank = Rank(64)
    rank.publish_many(500)
    rank.publish(stored(900), lost=True)
    answer = rank.ask(0)
    assert answer[-1][0] == 500
    rank.publish_many(1)
    check_whole(rank.ask(0), rank)


def test_an_emptied_cache_is_told_empty() -> None:
    rank = Rank(64)
    rank.publish_many(500)
    rank.publish(cleared())
    rank.publish(stored(7))
    (first, payload), newest = rank.ask(0)
    assert first == rank.number - 2
    assert len(decode_batch(payload).changes) == 1
    assert newest[0] == rank.number - 1


def test_too_many_blocks_and_it_answers_as_vllm_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_MAX_BLOCKS", 100)
    rank = Rank(64)
    rank.publish_many(500)
    assert [number for number, _ in rank.ask(0)] == list(range(436, 500))


def test_an_error_while_telling_is_no_short_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        yield b"half"
        raise RuntimeError

    monkeypatch.setattr(event_log, "retell", broken)
    rank = Rank(64)
    rank.publish_many(500)
    assert rank.log.answer(0) is None
    with pytest.raises(RuntimeError):
        while rank.log.work():
            pass
    assert [number for number, _ in rank.ask(0)] == list(range(436, 500))

"""Every way in which a stream of events can go wrong ends in the state that says so.

Scripts without sockets: a publisher, the messages that reach us, and the clock.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from common.identity import Target, WorkerId
from frontend.router.events.event_stream import (
    SETTLE_S,
    STRAGGLING_S,
    WAITING_BYTES,
    EventStream,
    Replay,
)
from frontend.router.index.indexes import EXACT, BlockIndexes, Knowledge, TargetBlocks
from tests.fakes.kv_events import (
    BLOCK_SIZE,
    Publisher,
    block,
    blocks,
    cleared,
    encode,
    frame,
    removed,
    stored,
)

TARGET = Target(WorkerId("w"), 0)


class Follower:
    """A stream over real indexes, and what its questions bring from a publisher."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        capacity_blocks: int = 0,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        indexes = BlockIndexes.empty()
        indexes.slots.open(TARGET)
        self.now = 100.0
        self.publisher = publisher
        self.index = indexes.known
        self.windows = indexes.windows
        held = TargetBlocks(TARGET, BLOCK_SIZE, capacity_blocks, indexes)
        self.stream = EventStream(held, "w", silence_s=2.0, waiting_bytes=waiting_bytes)
        self.question: Replay | None = None

    def is_(self, knowledge: Knowledge, reason: str = "") -> bool:
        """Whether the state is this one, for a reason with these words in it."""
        state = self.stream.state
        return state.knowledge is knowledge and reason in state.reason

    def ask(self, question: Replay | None) -> None:
        self.question = question or self.question

    def connect(self) -> None:
        self.ask(self.stream.on_connected(self.now))

    def receive(self, *messages: tuple[bytes, bytes]) -> None:
        for message in messages:
            self.ask(self.stream.on_live(*message, self.now))

    def answer(self) -> None:
        """Have the publisher answer the last question, and those that follow."""
        while self.question is not None:
            question, self.question = self.question, None
            for message in self.publisher.replay(question.start):
                self.ask(self.stream.on_replayed(question.attempt, *message, self.now))

    def fail(self) -> None:
        """Let the last question time out."""
        assert self.question is not None
        question, self.question = self.question, None
        self.stream.on_replay_failed(question.attempt, "no answer", self.now)

    def emptied(self, at: float) -> None:
        self.stream.on_emptied(at, self.now)

    def serve(self) -> None:
        """A request that must have stored blocks ends a second later."""
        self.now += 1.0
        self.stream.on_served(self.now, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ask(self.stream.tick(self.now))

    def holds(self, *numbers: int) -> bool:
        return all(self.index.match([block(number)]) == {TARGET: 1} for number in numbers)

    def lacks(self, *numbers: int) -> bool:
        return all(not self.index.match([block(number)]) for number in numbers)


def following(*events_before: int, buffer_steps: int = 100) -> Follower:
    """A follower in step with a publisher that stored the given blocks one by one."""
    publisher = Publisher(buffer_steps)
    for number in events_before:
        publisher.publish(stored(number))
    follower = Follower(publisher)
    follower.connect()
    follower.answer()
    follower.wait(SETTLE_S)
    follower.answer()
    assert follower.stream.state == EXACT
    return follower


# The worker says that its blocks were forgotten; an event follows with the engine's next step


def test_what_was_stored_before_is_forgotten_and_what_is_stored_later_is_kept() -> None:
    follower = following(1, 2)  # at 1000 and 1001, by the worker's clock
    follower.emptied(1002.5)
    assert follower.lacks(1, 2)
    follower.receive(follower.publisher.publish(stored(3)))  # at 1002: it was on its way
    assert follower.lacks(3)
    follower.receive(follower.publisher.publish(cleared(), stored(4)))
    assert follower.holds(4) and follower.stream.state == EXACT


def test_events_that_overtook_the_workers_word_keep_what_they_stored() -> None:
    follower = following(1)
    follower.receive(follower.publisher.publish(cleared(), stored(2)))  # at 1001
    follower.emptied(1000.5)
    assert follower.holds(2) and follower.lacks(1)


def test_a_clock_that_was_set_back_costs_the_blocks_of_seconds_only() -> None:
    follower = following(1)
    follower.emptied(5000.0)  # by a clock that is set back by an hour after that
    follower.receive(follower.publisher.publish(cleared(), stored(2)))  # at 1001
    assert follower.lacks(1, 2), "it may have been on its way"
    follower.wait(STRAGGLING_S)
    follower.receive(follower.publisher.publish(stored(3)))
    follower.receive(follower.publisher.publish(stored(4)))
    assert follower.holds(3, 4) and follower.stream.state == EXACT


def test_a_newcomer_does_not_believe_what_is_replayed_from_before() -> None:
    publisher = Publisher()
    publisher.publish(stored(1))
    follower = Follower(publisher)
    follower.emptied(1000.5)
    follower.connect()
    follower.answer()
    assert follower.lacks(1)
    follower.receive(publisher.publish(cleared(), stored(2)))
    assert follower.holds(2) and follower.stream.state == EXACT


# Starting


def test_what_was_stored_before_is_replayed_and_live_events_follow_without_a_seam() -> None:
    publisher = Publisher()
    publisher.publish(stored(1))
    publisher.publish(stored(2))
    follower = Follower(publisher)
    assert follower.is_(Knowledge.DEGRADED, "no connection")
    follower.connect()
    assert follower.is_(Knowledge.DEGRADED, "replay under way")
    follower.receive(publisher.publish(stored(3)))
    assert follower.lacks(1, 2, 3)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1, 2, 3)
    follower.receive(publisher.publish(removed(2)))
    assert follower.lacks(2)
    statistics = follower.stream.statistics()
    assert (statistics.batches, statistics.duplicates, statistics.gaps) == (4, 1, 0)


def test_an_event_lost_while_the_subscription_settles_is_found() -> None:
    publisher = Publisher()
    follower = Follower(publisher)
    follower.connect()
    follower.answer()
    publisher.publish(stored(1))
    follower.wait(SETTLE_S / 2)
    assert follower.question is None and follower.lacks(1)
    follower.wait(SETTLE_S)
    assert follower.stream.state == EXACT
    follower.answer()
    assert follower.holds(1)
    follower.wait(60.0)
    assert follower.question is None


def test_what_the_worker_no_longer_has_leaves_the_state_degraded() -> None:
    publisher = Publisher(buffer_steps=2)
    for number in range(5):
        publisher.publish(stored(number))
    follower = Follower(publisher)
    follower.connect()
    follower.answer()
    assert follower.is_(Knowledge.DEGRADED, "before 3 are no longer replayed")
    assert follower.holds(3, 4)
    follower.receive(publisher.publish(stored(9)))
    assert follower.holds(9)
    follower.receive(publisher.publish(cleared()), publisher.publish(stored(5)))
    assert follower.stream.state == EXACT
    assert follower.lacks(3, 4, 9)
    assert follower.holds(5)


def test_a_snapshot_brings_what_is_held_in_place_of_what_was_missed() -> None:
    publisher = Publisher(buffer_steps=2, keeps_account=True)
    for number in range(5):
        publisher.publish(stored(number))
    publisher.publish(removed(2))
    follower = Follower(publisher)
    follower.connect()
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(0, 1, 3, 4) and follower.lacks(2)
    follower.receive(publisher.publish(stored(5)))
    assert follower.holds(5) and follower.stream.statistics().gaps == 0


# Gaps


def test_a_gap_is_replayed_and_meanwhile_nothing_is_routed_on() -> None:
    follower = following(1)
    follower.publisher.publish(removed(1))
    follower.receive(follower.publisher.publish(stored(2)))
    assert follower.is_(Knowledge.DEGRADED, "events 1 to 1 are missing")
    assert follower.lacks(1, 2)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(2)
    assert follower.lacks(1)


def test_a_gap_older_than_the_buffer_forgets_what_was_known() -> None:
    follower = following(1, 2, buffer_steps=3)
    for number in range(10, 18):
        message = follower.publisher.publish(stored(number))
    follower.receive(message)
    follower.answer()
    assert follower.is_(Knowledge.DEGRADED, "no longer replayed")
    assert follower.lacks(1, 2, 10)
    assert follower.holds(15, 16, 17)
    assert follower.stream.statistics().losses == 1


def test_a_number_that_was_never_used_ends_in_degraded() -> None:
    follower = following(1)
    follower.publisher.skip()
    follower.receive(follower.publisher.publish(stored(2)))
    follower.answer()
    assert follower.is_(Knowledge.DEGRADED)
    assert follower.lacks(1)
    assert follower.holds(2)


def test_an_answer_that_stops_coming_is_asked_for_again_where_it_stopped() -> None:
    publisher = Publisher()
    for number in range(4):
        publisher.publish(stored(number))
    follower = Follower(publisher)
    follower.connect()
    assert follower.question is not None
    for message in publisher.replay(0)[:2]:
        follower.stream.on_replayed(follower.question.attempt, *message, 0.0)
    follower.fail()
    assert follower.question is None
    follower.wait(1.5)
    assert follower.question is not None and follower.question.start == 1
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(*range(4))


def test_answers_to_an_earlier_question_are_ignored() -> None:
    follower = following(1)
    follower.publisher.publish(stored(2))
    follower.receive(follower.publisher.publish(stored(3)))
    assert follower.question is not None
    earlier = follower.question.attempt - 1
    assert not follower.stream.on_replayed(earlier, frame(1), encode([stored(66)]), 0.0)
    follower.stream.on_replay_failed(earlier, "no answer", follower.now)
    follower.answer()
    assert follower.lacks(66)
    assert follower.holds(1, 2, 3)


def test_so_many_live_events_during_a_replay_that_they_are_replayed_instead() -> None:
    publisher = Publisher()
    follower = Follower(publisher, waiting_bytes=500)
    follower.connect()
    assert follower.question is not None
    end = publisher.replay(0)[-1]
    follower.receive(*(publisher.publish(stored(number)) for number in range(20)))
    follower.ask(follower.stream.on_replayed(follower.question.attempt, *end, follower.now))
    assert follower.is_(Knowledge.DEGRADED)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(*range(20))


def test_empty_events_that_wait_take_room_too() -> None:
    publisher = Publisher()
    follower = Follower(publisher, waiting_bytes=1 << 16)
    follower.connect()
    assert follower.question is not None
    end = publisher.replay(0)[-1]
    follower.receive(*((frame(number), b"") for number in range(1000)))
    follower.ask(follower.stream.on_replayed(follower.question.attempt, *end, follower.now))
    assert follower.is_(Knowledge.DEGRADED, "more events came than could wait")


def test_a_gap_among_those_that_waited_is_replayed_too() -> None:
    publisher = Publisher()
    follower = Follower(publisher)
    follower.connect()
    assert follower.question is not None
    end = publisher.replay(0)[-1]
    messages = [publisher.publish(stored(number)) for number in range(4)]
    follower.receive(messages[0], messages[2], messages[3])
    follower.ask(follower.stream.on_replayed(follower.question.attempt, *end, follower.now))
    assert follower.is_(Knowledge.DEGRADED, "events 1 to 1 are missing")
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(*range(4))


# Connections


def reconnect(follower: Follower) -> None:
    follower.stream.on_disconnected()
    assert follower.is_(Knowledge.DEGRADED, "no connection")
    follower.connect()


@pytest.mark.parametrize("numbers", [(), (7,), (7, 8), (7, 8, 9)])
def test_whoever_answers_at_the_endpoint_now_is_learned_anew(numbers: tuple[int, ...]) -> None:
    """Before, behind and exactly where we were by number."""
    follower = following(1, 2)
    late = follower.publisher.publish(stored(3))
    follower.publisher = Publisher(time=9000.0)
    messages = [follower.publisher.publish(stored(number)) for number in numbers]
    follower.stream.on_disconnected()
    assert follower.lacks(1, 2)
    follower.receive(late)  # of the connection before
    assert follower.lacks(3)
    follower.connect()
    follower.receive(*messages[-1:])
    follower.wait(SETTLE_S)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(*numbers)
    assert follower.lacks(1, 2, 3)


def test_a_connection_that_broke_brings_its_blocks_again() -> None:
    follower = following(1, 2)
    follower.publisher.publish(stored(3))
    reconnect(follower)
    assert follower.is_(Knowledge.DEGRADED, "the connection broke")
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1, 2, 3)


def test_an_answer_from_before_the_connection_broke_is_of_no_use() -> None:
    follower = following(1)
    follower.publisher.publish(stored(2))
    follower.receive(follower.publisher.publish(stored(3)))
    reconnect(follower)
    assert follower.question is not None
    attempt = follower.question.attempt - 1
    for message in follower.publisher.replay(0):
        assert follower.stream.on_replayed(attempt, *message, follower.now) is None
    assert follower.lacks(1, 2, 3)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1, 2, 3)


def test_late_events_of_a_dead_incarnation_change_nothing() -> None:
    follower = following(1)
    follower.stream.close()
    follower.index.drop(TARGET.worker_id)
    follower.receive(follower.publisher.publish(stored(2)))
    follower.stream.on_disconnected()
    follower.connect()
    follower.wait(10.0)
    assert not follower.question
    assert follower.lacks(1, 2)
    assert not follower.index._slots.targets()
    assert follower.is_(Knowledge.APPROXIMATE, "the worker is gone")


# Silence


def test_a_silent_stream_of_a_serving_worker_is_checked() -> None:
    follower = following(1)
    follower.serve()
    follower.publisher.publish(stored(2))
    follower.wait(1.0)
    assert not follower.question
    follower.wait(1.5)
    assert follower.question and follower.stream.state == EXACT and follower.holds(1)
    follower.receive(follower.publisher.publish(stored(3)))
    assert follower.lacks(3)
    follower.answer()
    assert follower.holds(1, 2, 3)


def test_a_stream_that_is_silent_because_nothing_happened_stays_exact() -> None:
    follower = following(1)
    for _ in range(3):
        follower.serve()
        follower.wait(2.5)
        assert follower.question
        follower.answer()
        assert follower.stream.state == EXACT and follower.holds(1)
        follower.wait(10.0)
        assert not follower.question


def test_events_that_arrived_since_routing_are_no_silence() -> None:
    follower = following(1)
    routed_at = follower.now
    follower.now += 1.0
    follower.receive(follower.publisher.publish(stored(2)))
    follower.stream.on_served(routed_at, follower.now)
    follower.wait(10.0)
    assert not follower.question


def test_silence_that_even_a_replay_does_not_break_makes_the_worker_approximate() -> None:
    follower = following(1)
    follower.serve()
    follower.wait(2.5)
    follower.fail()
    assert follower.is_(Knowledge.APPROXIMATE, "no answer")
    assert follower.lacks(1)
    # Asked again later, it answers.
    follower.wait(1.5)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1)


def test_a_worker_that_serves_and_can_not_be_connected_to_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    follower = Follower(Publisher())
    for _ in range(3):
        follower.wait(5.0)
        assert follower.is_(Knowledge.DEGRADED, "no connection") and not caplog.records
    for _ in range(3):
        follower.serve()
        follower.wait(2.5)
    assert ["no connection" in one.getMessage() for one in caplog.records] == [True]


def test_a_replay_endpoint_that_does_not_answer_is_asked_again_and_again() -> None:
    publisher = Publisher()
    publisher.publish(stored(1))
    follower = Follower(publisher)
    follower.connect()
    for _ in range(3):
        follower.fail()
        assert follower.is_(Knowledge.APPROXIMATE, "no answer")
        follower.receive(publisher.publish(stored(2)))
        assert follower.lacks(1, 2)
        follower.wait(60.0)
    assert follower.is_(Knowledge.APPROXIMATE, "no answer")
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1, 2)


# Bad input


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ((b"abc", b""), "sequence"),
        ((frame(1), b"\xc1 noise"), "payload"),
        ((frame(1), encode([stored(5)])[:-3]), "payload"),
        ((frame(1), encode([stored(5, block_hashes=[b"?"])])), "hash-length"),
    ],
)
def test_unreadable_messages_are_counted_and_change_nothing_else(
    message: tuple[bytes, bytes], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    follower = following(1)
    for _ in range(3):
        follower.receive(message)
    assert follower.stream.statistics().malformed == {kind: 3}
    assert len([one for one in caplog.records if "malformed" in one.message]) == 1
    assert follower.stream.state == EXACT
    assert follower.holds(1)
    follower.receive(follower.publisher.publish(stored(2)))
    assert follower.stream.state == EXACT
    assert follower.holds(1, 2)


def test_an_unreadable_copy_of_an_event_is_replaced_by_a_good_one() -> None:
    follower = following(1)
    sequence, payload = follower.publisher.publish(removed(1))
    follower.receive((sequence, payload[:-2]))
    assert follower.holds(1)
    follower.receive(follower.publisher.publish(stored(2)))
    follower.answer()
    assert follower.lacks(1) and follower.holds(2)
    assert follower.stream.state == EXACT


def test_an_event_that_is_unreadable_in_the_replay_too_is_a_loss() -> None:
    follower = following(1)
    follower.receive(follower.publisher.publish_raw(b"rubbish"))
    follower.receive(follower.publisher.publish(stored(2)))
    follower.answer()
    assert follower.is_(Knowledge.DEGRADED, "event 1 can't be read")
    assert follower.lacks(1)
    assert follower.holds(2)


def test_an_invented_sequence_number_is_found_out() -> None:
    follower = following(1)
    follower.receive((frame(2**63), encode([stored(66)], time=1e9)))
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1)
    assert follower.lacks(66)
    follower.receive(follower.publisher.publish(stored(2)))
    assert follower.stream.state == EXACT
    assert follower.holds(2)


def test_another_block_size_than_on_the_card_makes_the_worker_approximate() -> None:
    follower = following(1)
    follower.receive(follower.publisher.publish(stored(2, block_size=32)))
    assert follower.is_(
        Knowledge.APPROXIMATE, "its events have blocks of 32 tokens, its card says 16"
    )
    assert follower.lacks(1, 2)
    follower.receive(follower.publisher.publish(stored(3)))
    assert follower.lacks(3)


def test_hashes_cut_to_integers_make_the_worker_approximate() -> None:
    follower = following(1)
    follower.receive(follower.publisher.publish(stored(2, block_hashes=[12345])))
    assert follower.is_(Knowledge.APPROXIMATE, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES")
    assert follower.lacks(1)


def test_more_blocks_than_the_cache_has_make_the_worker_approximate() -> None:
    follower = Follower(Publisher(), capacity_blocks=10)
    follower.connect()
    follower.answer()
    follower.receive(follower.publisher.publish(stored(*range(10))))
    assert follower.stream.state == EXACT
    follower.receive(follower.publisher.publish(stored(10)))
    assert follower.is_(Knowledge.APPROXIMATE, "more blocks than its cache has")
    assert follower.lacks(*range(11))


# Groups and media


def test_all_full_attention_groups_must_hold_a_block() -> None:
    follower = following()
    follower.receive(
        follower.publisher.publish(stored(1, 2), stored(1, 2, group_idx=1)),
        follower.publisher.publish(removed(2, group_idx=1)),
    )
    assert follower.index.match(blocks(1, 2)) == {TARGET: 1}


def test_windowed_groups_are_kept_apart() -> None:
    follower = following()
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    follower.receive(
        follower.publisher.publish(
            stored(1, 2, 3), stored(1, 2, 3, kv_cache_spec_sliding_window=33, **window)
        ),
        follower.publisher.publish(removed(1, 3, group_idx=1)),
    )
    assert follower.index.match(blocks(1, 2, 3)) == {TARGET: 3}
    assert follower.windows.trim(TARGET, blocks(1, 2, 3), 3) == 0
    assert follower.stream.state == EXACT


def test_groups_that_are_not_modelled_degrade() -> None:
    follower = following()
    odd = stored(1, group_idx=1, kv_cache_spec_kind="chunked_local_attention")
    follower.receive(follower.publisher.publish(stored(1), odd))
    assert follower.is_(Knowledge.DEGRADED, "chunked_local_attention")
    assert follower.holds(1)


def test_a_block_is_held_until_its_last_copy_on_any_medium_is_gone() -> None:
    follower = following()
    publish = follower.publisher.publish
    follower.receive(publish(stored(1), stored(1, medium="CPU"), stored(1, medium="CPU")))
    follower.receive(publish(removed(1)))
    assert follower.holds(1)
    follower.receive(publish(removed(1, medium="CPU")))
    assert follower.lacks(1)
    follower.receive(publish(removed(1, medium="CPU"), stored(2, medium="CPU", block_size=64)))
    assert follower.lacks(1, 2)
    assert follower.stream.state == EXACT


# Anything in any order


class AgainstTruth(RuleBasedStateMachine):
    """Whatever the network and the worker do: what is routed on in any state is really held, and
    in the end all is known exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.truth: set[int] = set()
        self.clock = 1000.0
        self.follower = Follower(self.fresh_publisher())
        self.in_flight: list[tuple[bytes, bytes]] = []
        self.connected = False

    def fresh_publisher(self) -> Publisher:
        self.clock += 1000.0
        return Publisher(buffer_steps=3, time=self.clock, keeps_account=True)

    @rule(numbers=st.sets(st.integers(0, 5), min_size=1), arrives=st.booleans())
    def store(self, numbers: set[int], arrives: bool) -> None:
        fresh = sorted(numbers - self.truth)
        self.truth |= numbers
        self.send(self.follower.publisher.publish(stored(*fresh)), arrives)

    @rule(numbers=st.sets(st.integers(0, 5), min_size=1), arrives=st.booleans())
    def evict(self, numbers: set[int], arrives: bool) -> None:
        gone = sorted(numbers & self.truth)
        self.truth -= numbers
        self.send(self.follower.publisher.publish(removed(*gone)), arrives)

    @rule(arrives=st.booleans())
    def reset(self, arrives: bool) -> None:
        self.truth.clear()
        self.send(self.follower.publisher.publish(cleared()), arrives)

    def send(self, message: tuple[bytes, bytes], arrives: bool) -> None:
        if arrives and self.connected:
            self.in_flight.append(message)

    @precondition(lambda self: self.in_flight)
    @rule()
    def deliver(self) -> None:
        self.follower.receive(self.in_flight.pop(0))

    @rule()
    def reconnect(self) -> None:
        self.follower.stream.on_disconnected()
        self.in_flight.clear()
        self.follower.connect()
        self.connected = True

    @rule()
    def restart(self) -> None:
        self.truth.clear()
        self.follower.publisher = self.fresh_publisher()
        self.reconnect()

    @rule()
    def rubbish(self) -> None:
        self.follower.receive((frame(3), b"rubbish"), (frame(2**40), encode([stored(9)], 1e9)))

    @precondition(lambda self: self.follower.question)
    @rule(fails=st.booleans())
    def answer(self, fails: bool) -> None:
        if fails:
            self.follower.fail()
        else:
            self.follower.answer()

    @rule(seconds=st.sampled_from([0.4, 40.0]))
    def wait(self, seconds: float) -> None:
        self.follower.wait(seconds)

    @rule()
    def settle(self) -> None:
        """Let everything arrive and every question be answered.

        An event that got lost shows at the next one, or when a request it should have
        come with is over; the latter is what happens here.
        """
        if not self.connected:
            self.reconnect()
        while self.in_flight:
            self.deliver()
        self.follower.serve()
        for _ in range(3):
            self.follower.answer()
            self.follower.wait(40.0)
        self.follower.answer()
        known = {number for number in range(10) if self.follower.holds(number)}
        assert self.follower.stream.state == EXACT
        assert known == self.truth


TestAgainstTruth = AgainstTruth.TestCase
TestAgainstTruth.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)

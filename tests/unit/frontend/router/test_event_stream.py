"""Every way in which a stream of events can go wrong ends in the state that says so.

Scripts without sockets: a publisher, the messages that reach us, and the clock.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from common.identity import Target, WorkerId
from frontend.router.events.event_stream import STRAGGLING_S, EventStream
from frontend.router.events.replays import (
    BELIEVED_EVENTS,
    WAITING_BYTES,
    Command,
    Replay,
    Resubscribe,
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
    """A stream over real indexes, and what its commands do to a publisher."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        replayable: bool = True,
        capacity_blocks: int = 0,
        waiting_bytes: int = WAITING_BYTES,
        believed_events: int = BELIEVED_EVENTS,
    ) -> None:
        indexes = BlockIndexes.empty()
        indexes.slots.open(TARGET)
        self.now = 100.0
        self.publisher = publisher
        self.index = indexes.known
        self.windows = indexes.windows
        held = TargetBlocks(TARGET, BLOCK_SIZE, capacity_blocks, indexes)
        self.stream = EventStream(
            held,
            "w",
            replayable=replayable,
            silence_s=2.0,
            waiting_bytes=waiting_bytes,
            believed_events=believed_events,
        )
        self.commands: list[Command] = []
        self.obey(self.stream.start())

    def is_(self, knowledge: Knowledge, reason: str = "") -> bool:
        """Whether the state is this one, for a reason with these words in it."""
        state = self.stream.state
        return state.knowledge is knowledge and reason in state.reason

    def obey(self, commands: list[Command]) -> None:
        self.commands += commands

    def connect(self) -> None:
        self.obey(self.stream.on_connected(self.now))

    def receive(self, *messages: tuple[bytes, bytes]) -> None:
        for message in messages:
            self.obey(self.stream.on_live(*message, self.now))

    def answer(self, *, drop: int | None = None) -> None:
        """Have the publisher answer the last replay asked for, and those that follow.

        Args:
            drop: messages after this many get lost in each answer, save the end.
        """
        while self.commands:
            command = self.commands.pop()
            if isinstance(command, Resubscribe):
                self.connect()
                continue
            messages = self.publisher.replay(command.start)
            if drop is not None:
                messages = [*messages[:-1][:drop], messages[-1]]
            for message in messages:
                self.obey(self.stream.on_replayed(command.attempt, *message, self.now))

    def fail(self) -> None:
        """Let the last replay asked for time out."""
        command = self.commands.pop()
        if isinstance(command, Resubscribe):
            return
        self.obey(self.stream.on_replay_failed(command.attempt, "no answer", self.now))

    def emptied(self, at: float) -> None:
        self.stream.on_emptied(at, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.stream.tick(self.now))

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
    follower.wait(0.4)
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
    follower.wait(0.4)
    follower.answer()
    assert follower.holds(2) and follower.stream.state == EXACT


# Starting


def test_what_was_stored_before_is_replayed_and_live_events_follow_without_a_seam() -> None:
    publisher = Publisher()
    publisher.publish(stored(1))
    publisher.publish(stored(2))
    follower = Follower(publisher)
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


def test_without_a_live_connection_a_replay_alone_is_not_enough() -> None:
    publisher = Publisher()
    publisher.publish(stored(1))
    follower = Follower(publisher)
    follower.answer()
    assert follower.is_(Knowledge.DEGRADED, "no connection")
    assert follower.lacks(1)
    follower.connect()
    assert follower.stream.state == EXACT
    assert follower.holds(1)


def test_an_event_lost_while_the_subscription_settles_is_found() -> None:
    publisher = Publisher()
    follower = Follower(publisher)
    follower.answer()
    follower.connect()
    publisher.publish(stored(1))
    follower.wait(0.4)
    assert follower.stream.state == EXACT
    follower.answer()
    assert follower.holds(1)


def test_a_replay_buffer_that_no_longer_reaches_back_leaves_the_state_degraded() -> None:
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


def test_a_gap_that_leaves_no_proof_of_the_last_event_counts_as_older() -> None:
    # The event we applied last is just gone from the buffer, the next one is there.
    follower = following(1, buffer_steps=2)
    messages = [follower.publisher.publish(stored(number)) for number in (2, 3)]
    follower.receive(messages[1])
    follower.answer()
    assert follower.is_(Knowledge.DEGRADED)
    assert follower.lacks(1)
    assert follower.holds(2, 3)


def test_a_number_that_was_never_used_ends_in_degraded() -> None:
    follower = following(1)
    follower.publisher.skip()
    follower.receive(follower.publisher.publish(stored(2)))
    follower.answer()
    assert follower.is_(Knowledge.DEGRADED)
    assert follower.lacks(1)
    assert follower.holds(2)


def test_the_end_of_a_long_replay_is_not_believed_at_once() -> None:
    publisher = Publisher()
    for number in range(20):
        publisher.publish(stored(number))
    follower = Follower(publisher, believed_events=5)
    follower.connect()
    follower.answer(drop=7)
    assert follower.stream.state == EXACT
    assert follower.holds(*range(20))


def test_a_replay_that_ended_before_an_event_that_arrived_goes_on() -> None:
    follower = following(0)
    for number in range(1, 20):
        message = follower.publisher.publish(stored(number))
    follower.receive(message)
    follower.answer(drop=7)
    assert follower.stream.state == EXACT
    assert follower.holds(*range(20))


def test_a_hole_in_a_replay_is_filled() -> None:
    publisher = Publisher()
    for number in range(6):
        publisher.publish(stored(number))
    follower = Follower(publisher)
    follower.connect()
    command = follower.commands.pop()
    assert isinstance(command, Replay)
    for position, message in enumerate(publisher.replay(0)):
        if position not in (2, 3):
            follower.obey(follower.stream.on_replayed(command.attempt, *message, 0.0))
    assert follower.is_(Knowledge.DEGRADED)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(*range(6))


def test_a_lost_end_of_replay_is_asked_for_again() -> None:
    publisher = Publisher()
    publisher.publish(stored(1))
    follower = Follower(publisher)
    follower.connect()
    command = follower.commands[-1]
    assert isinstance(command, Replay)
    for message in publisher.replay(0)[:-1]:
        follower.stream.on_replayed(command.attempt, *message, 0.0)
    follower.fail()
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1)


def test_answers_to_an_earlier_question_are_ignored() -> None:
    follower = following(1)
    follower.publisher.publish(stored(2))
    follower.receive(follower.publisher.publish(stored(3)))
    old = follower.commands.pop()
    assert isinstance(old, Replay)
    assert not follower.stream.on_replayed(old.attempt - 1, frame(1), encode([stored(66)]), 0.0)
    follower.commands.append(old)
    follower.answer()
    assert follower.lacks(66)
    assert follower.holds(1, 2, 3)


def test_so_many_live_events_during_a_replay_that_they_are_replayed_instead() -> None:
    publisher = Publisher()
    follower = Follower(publisher, waiting_bytes=500)
    follower.connect()
    command = follower.commands.pop()
    assert isinstance(command, Replay)
    end = publisher.replay(0)[-1]
    follower.receive(*(publisher.publish(stored(number)) for number in range(20)))
    follower.obey(follower.stream.on_replayed(command.attempt, *end, follower.now))
    assert follower.is_(Knowledge.DEGRADED)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(*range(20))


# Restarts


def restart(follower: Follower, *numbers: int) -> list[tuple[bytes, bytes]]:
    """Replace the publisher by a younger one that stored the given blocks."""
    follower.publisher = Publisher(time=9000.0)
    return [follower.publisher.publish(stored(number)) for number in numbers]


def test_a_worker_that_starts_over_from_zero() -> None:
    follower = following(1, 2, 3)
    follower.receive(*restart(follower, 7))
    assert follower.lacks(1, 2, 3)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(7)
    assert follower.lacks(1, 2, 3)
    assert follower.stream.statistics().restarts == 1


def test_a_worker_that_starts_over_and_is_already_further_than_before() -> None:
    # Its first events were missed while reconnecting, so that numbers alone look fine.
    follower = following(1, 2)
    messages = restart(follower, 7, 8, 9, 10)
    follower.receive(messages[-1])
    assert follower.lacks(1, 2)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(7, 8, 9, 10)
    assert follower.lacks(1, 2)


def test_a_worker_that_starts_over_exactly_where_we_were_shows_in_the_connection() -> None:
    follower = following(1, 2)
    messages = restart(follower, 7, 8, 9)
    follower.stream.on_disconnected()
    assert follower.lacks(1, 2)
    assert follower.is_(Knowledge.DEGRADED, "no connection")
    follower.connect()
    assert follower.lacks(1, 2)
    follower.receive(messages[-1])
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(7, 8, 9)
    assert follower.lacks(1, 2)


def test_a_worker_that_starts_over_and_has_stored_nothing() -> None:
    follower = following(1, 2)
    restart(follower)
    follower.stream.on_disconnected()
    follower.connect()
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.lacks(1, 2)


def test_a_connection_that_broke_without_a_restart_keeps_its_blocks() -> None:
    follower = following(1, 2)
    follower.stream.on_disconnected()
    follower.publisher.publish(stored(3))
    follower.connect()
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1, 2, 3)
    assert follower.stream.statistics().restarts == 0


def test_messages_of_the_old_run_that_waited_are_not_applied_to_the_new() -> None:
    follower = following(1, 2)
    follower.publisher.publish(stored(3))
    old = follower.publisher.publish(stored(4))
    follower.receive(old)
    restart(follower, 7, 8, 9)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(7, 8, 9)
    assert follower.lacks(1, 2, 3, 4)


def test_late_events_of_a_dead_incarnation_change_nothing() -> None:
    follower = following(1)
    follower.stream.close()
    follower.index.drop(TARGET.worker_id)
    follower.receive(follower.publisher.publish(stored(2)))
    follower.connect()
    follower.wait(10.0)
    assert not follower.commands
    assert follower.lacks(1, 2)
    assert not follower.index._slots.targets()
    assert follower.is_(Knowledge.APPROXIMATE, "the worker is gone")


# Silence


def test_a_silent_stream_of_a_serving_worker_is_checked() -> None:
    follower = following(1)
    follower.stream.on_served(follower.now, follower.now)
    follower.publisher.publish(stored(2))
    follower.wait(1.0)
    assert not follower.commands
    follower.wait(1.5)
    assert follower.stream.state == EXACT
    command = follower.commands.pop()
    assert isinstance(command, Replay)
    for message in follower.publisher.replay(command.start):
        follower.obey(follower.stream.on_replayed(command.attempt, *message, follower.now))
    assert follower.holds(1, 2)
    # The replay had what the live connection did not bring.
    assert follower.commands == [Resubscribe()]


def test_a_stream_that_is_silent_because_nothing_happened_stays_exact() -> None:
    follower = following(1)
    follower.stream.on_served(follower.now, follower.now)
    follower.wait(2.5)
    follower.answer()
    assert follower.stream.state == EXACT
    for _ in range(2):
        follower.stream.on_served(follower.now, follower.now)
        follower.wait(2.5)
        follower.answer()
    assert follower.is_(Knowledge.DEGRADED, "publishes no events")
    follower.receive(follower.publisher.publish(stored(2)))
    assert follower.stream.state == EXACT


def test_events_that_arrived_since_routing_are_no_silence() -> None:
    follower = following(1)
    routed_at = follower.now
    follower.now += 1.0
    follower.receive(follower.publisher.publish(stored(2)))
    follower.stream.on_served(routed_at, follower.now)
    follower.wait(10.0)
    assert not follower.commands


def test_silence_that_even_a_replay_does_not_break_makes_the_worker_approximate() -> None:
    follower = following(1)
    follower.stream.on_served(follower.now, follower.now)
    follower.wait(2.5)
    follower.fail()
    assert follower.is_(Knowledge.APPROXIMATE, "no answer")
    assert follower.lacks(1)
    # Asked again later, it answers: everything is learned anew.
    follower.wait(1.0)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1)


def test_a_check_that_fails_without_any_silence_changes_nothing() -> None:
    publisher = Publisher()
    publisher.publish(stored(1))
    follower = Follower(publisher)
    follower.answer()
    follower.connect()
    follower.wait(0.4)
    follower.receive(publisher.publish(stored(2)))
    follower.fail()
    assert follower.stream.state == EXACT
    assert follower.holds(1, 2)


# Without replay


def test_a_replay_endpoint_that_never_answers_leaves_live_events() -> None:
    publisher = Publisher()
    publisher.publish(stored(1))
    follower = Follower(publisher)
    follower.connect()
    follower.fail()
    assert follower.is_(Knowledge.APPROXIMATE, "no answer")
    follower.receive(publisher.publish(stored(2)))
    assert follower.is_(Knowledge.DEGRADED)
    assert follower.holds(2)
    follower.wait(1.0)
    follower.fail()
    assert follower.holds(2)
    follower.wait(2.0)
    follower.receive(publisher.publish(stored(3)))
    assert follower.holds(2, 3)
    follower.answer()
    assert follower.stream.state == EXACT
    assert follower.holds(1, 2, 3)


def test_a_worker_without_replay_is_exact_from_its_first_event_on() -> None:
    follower = Follower(Publisher(), replayable=False)
    follower.connect()
    assert follower.is_(Knowledge.APPROXIMATE, "no replay endpoint")
    follower.receive(follower.publisher.publish(stored(1)))
    assert follower.stream.state == EXACT
    assert follower.holds(1)


def test_a_worker_without_replay_that_ran_before_is_degraded() -> None:
    follower = Follower(Publisher(), replayable=False)
    follower.connect()
    follower.publisher.publish(stored(1))
    follower.receive(follower.publisher.publish(stored(2)))
    assert follower.is_(Knowledge.DEGRADED, "number 1")
    assert follower.holds(2)


def test_without_replay_a_gap_forgets() -> None:
    follower = Follower(Publisher(), replayable=False)
    follower.connect()
    follower.receive(follower.publisher.publish(stored(1)))
    follower.publisher.publish(removed(1))
    follower.receive(follower.publisher.publish(stored(2)))
    assert follower.is_(Knowledge.DEGRADED, "events 1 to 1 are missing")
    assert follower.lacks(1)
    assert follower.holds(2)


def test_without_replay_a_restart_forgets_and_is_exact_again() -> None:
    follower = Follower(Publisher(), replayable=False)
    follower.connect()
    for number in (1, 2, 3):
        follower.receive(follower.publisher.publish(stored(number)))
    follower.receive(*restart(follower, 7))
    assert follower.stream.state == EXACT
    assert follower.holds(7)
    assert follower.lacks(1, 2, 3)


def test_without_replay_a_broken_connection_forgets() -> None:
    follower = Follower(Publisher(), replayable=False)
    follower.connect()
    follower.receive(follower.publisher.publish(stored(1)))
    follower.stream.on_disconnected()
    follower.connect()
    assert follower.lacks(1)
    follower.receive(follower.publisher.publish(stored(2)))
    assert follower.is_(Knowledge.DEGRADED)
    assert follower.holds(2)


def test_without_replay_silence_makes_the_worker_approximate() -> None:
    follower = Follower(Publisher(), replayable=False)
    follower.connect()
    follower.receive(follower.publisher.publish(stored(1)))
    follower.now += 1.0
    follower.stream.on_served(follower.now, follower.now)
    follower.wait(2.5)
    assert follower.is_(Knowledge.APPROXIMATE, "sends no events")
    assert follower.lacks(1)


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
    follower.wait(0.4)
    follower.answer()
    assert follower.lacks(1)
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
    assert follower.stream.statistics().malformed == {"sequence": 1}
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
    follower = Follower(Publisher(), replayable=False, capacity_blocks=10)
    follower.connect()
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
    """Whatever the network and the worker do: what is exact is right, and what is
    routed on in any state is really held."""

    def __init__(self) -> None:
        super().__init__()
        self.truth: set[int] = set()
        self.clock = 1000.0
        self.follower = Follower(self.fresh_publisher())
        self.in_flight: list[tuple[bytes, bytes]] = []
        self.connected = False

    def fresh_publisher(self) -> Publisher:
        self.clock += 1000.0
        return Publisher(buffer_steps=3, time=self.clock)

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

    @precondition(lambda self: self.follower.commands)
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
        self.follower.now += 1.0
        self.follower.stream.on_served(self.follower.now, self.follower.now)
        for _ in range(3):
            self.follower.answer()
            self.follower.wait(40.0)
        self.follower.answer()
        known = {number for number in range(10) if self.follower.holds(number)}
        assert known <= self.truth
        if self.follower.stream.state == EXACT:
            assert known == self.truth


TestAgainstTruth = AgainstTruth.TestCase
TestAgainstTruth.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)

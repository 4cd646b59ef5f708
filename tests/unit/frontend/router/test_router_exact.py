"""Routing on workers whose caches are known from events."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from common.identity import BlockHash, Incarnation, RequestId, Target, WorkerId
from frontend.router.event_wire import Cleared, Need, Removed, Stored
from frontend.router.hashing.block_hasher import BlockHasher
from frontend.router.index.indexes import degraded
from frontend.router.inputs import EventSource, RoutableWorker, RoutingRequest
from frontend.router.router import Router
from tests.fakes.feeds import ScriptedFeeds

BLOCK = 16
PROMPT = list(range(8 * BLOCK))
HASHES = BlockHasher(BLOCK, "sha256_cbor", bytes(32)).hash(PROMPT, ())


def stored(hashes: Sequence[BlockHash], need: Need = Need.EVERY, group: int = 0) -> Stored:
    window = 2 * BLOCK + 1 if need is Need.WINDOW else 0
    return Stored(list(hashes), BLOCK, group, need, window, "any", False, None, True)


def removed(hashes: Sequence[BlockHash], group: int = 0) -> Removed:
    return Removed(list(hashes), group, False)


class Fleet:
    """A router over workers whose caches a test dictates."""

    def __init__(self) -> None:
        self.now = 0.0
        self.feeds = ScriptedFeeds()
        self.router = Router(clock=lambda: self.now, feeds=self.feeds, seed=1)
        self._count = 0

    async def add(self, name: str, incarnation: str = "1") -> None:
        await self.router.roster.add(
            RoutableWorker(
                worker_id=WorkerId(name),
                incarnation=Incarnation(incarnation),
                ranks=(0,),
                block_size=BLOCK,
                hash_algorithm="sha256_cbor",
                none_hash=bytes(32),
                event_sources=(EventSource(0, "unused", "unused"),),
            )
        )

    def request(self, tokens: Sequence[int] = PROMPT) -> RoutingRequest:
        self._count += 1
        return RoutingRequest(RequestId(str(self._count)), tokens)

    def overlap(self, tokens: Sequence[int] = (*PROMPT, 1)) -> dict[str, int]:
        """Per worker, the leading blocks that a decision counts on; routes nothing."""
        decision = self.router.route(self.request(tokens))
        self.router.in_flight.finished(decision.request_id)
        return {
            one.target.worker_id: one.work.overlap_blocks
            for one in decision.considered
            if one.work.overlap_blocks
        }


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    await made.add("a")
    await made.add("b")
    yield made
    await made.router.close()


async def test_what_events_announced_is_routed_on(fleet: Fleet) -> None:
    fleet.feeds.by_worker["b"].apply(stored(HASHES))
    fleet.feeds.by_worker["a"].apply(stored(HASHES[:3]))
    assert fleet.overlap() == {"a": 3, "b": 8}
    decision = fleet.router.route(fleet.request())
    assert (decision.worker_id, decision.reason) == ("b", "kv-overlap")
    assert decision.index == "exact"
    # All eight blocks are held, but the engine has to compute the last token.
    assert decision.predicted_cached_tokens == 7 * BLOCK


async def test_what_events_took_back_is_not(fleet: Fleet) -> None:
    feed = fleet.feeds.by_worker["a"]
    feed.apply(stored(HASHES), removed(HASHES[5:]))
    assert fleet.overlap() == {"a": 5}
    feed.apply(Cleared())
    assert fleet.overlap() == {}


async def test_an_identical_prompt_follows_before_any_event(fleet: Fleet) -> None:
    long = list(range(32 * BLOCK))  # a short one is sooner computed again than waited for
    first = fleet.router.route(fleet.request(long))
    second = fleet.router.route(fleet.request(long))
    assert second.worker_id == first.worker_id
    assert second.overlap_blocks == 31


async def test_a_request_may_end_before_its_events_are_out(fleet: Fleet) -> None:
    """As one of a single token does: the next like it must not go elsewhere."""
    one = fleet.request()
    decision = fleet.router.route(one)
    fleet.router.in_flight.finished(one.request_id, served=True)
    assert fleet.overlap() == {decision.worker_id: 8}
    fleet.now = 5.1
    fleet.overlap([1])
    assert fleet.overlap() == {}


async def test_a_prediction_that_no_event_confirms_expires(fleet: Fleet) -> None:
    fleet.router.route(fleet.request())
    fleet.now = 5.1
    fleet.overlap([1])
    assert fleet.overlap() == {}


async def test_an_eviction_ends_a_prediction(fleet: Fleet) -> None:
    decision = fleet.router.route(fleet.request())
    feed = fleet.feeds.by_worker[decision.worker_id]
    feed.apply(stored(HASHES), removed(HASHES[2:]))
    assert fleet.overlap() == {decision.worker_id: 2}


async def test_a_degraded_worker_keeps_predictions_for_longer(fleet: Fleet) -> None:
    for feed in fleet.feeds.by_worker.values():
        feed.known = degraded("a test says so")
    one = fleet.request()
    home = fleet.router.route(one).worker_id
    fleet.router.in_flight.finished(one.request_id, served=True)
    fleet.now = 60.0
    assert fleet.overlap() == {home: 8}
    assert "a test" in fleet.router.roster.state(Target(home, 0)).reason


async def test_suspended_blocks_are_not_routed_on(fleet: Fleet) -> None:
    feed = fleet.feeds.by_worker["a"]
    feed.apply(stored(HASHES))
    feed.blocks[0].suspend()
    assert fleet.overlap() == {}
    feed.blocks[0].resume()
    assert fleet.overlap() == {"a": 8}


async def test_feeds_hear_of_requests_that_must_have_stored_blocks(fleet: Fleet) -> None:
    await fleet.router.roster.remove(WorkerId("b"))
    feed = fleet.feeds.by_worker["a"]
    fleet.now = 3.0
    for cached, tokens in ((0, PROMPT), (0, PROMPT[:5]), (None, PROMPT)):
        one = fleet.request(tokens)
        fleet.router.route(one)
        fleet.router.in_flight.finished(one.request_id, served=cached is not None)
    assert feed.served_since == [3.0]
    feed.apply(stored(HASHES))
    one = fleet.request([*PROMPT, 1])
    fleet.router.route(one)
    fleet.router.in_flight.finished(one.request_id, served=True)
    assert feed.served_since == [3.0]


async def test_requests_of_an_earlier_incarnation_say_nothing_of_this_one(fleet: Fleet) -> None:
    await fleet.router.roster.remove(WorkerId("b"))
    old = fleet.feeds.by_worker["a"]
    one = fleet.request()
    fleet.router.route(one)
    await fleet.add("a", incarnation="2")
    assert old.closed
    fleet.router.in_flight.finished(one.request_id, served=True)
    assert fleet.feeds.by_worker["a"].served_since == old.served_since == []


async def test_late_events_of_a_dead_incarnation_reach_no_decision(fleet: Fleet) -> None:
    old = fleet.feeds.by_worker["a"]
    old.apply(stored(HASHES))
    await fleet.add("a", incarnation="2")
    assert fleet.overlap() == {}


async def test_a_hit_is_as_short_as_its_windowed_groups_demand(fleet: Fleet) -> None:
    feed = fleet.feeds.by_worker["a"]
    feed.apply(stored(HASHES), stored(HASHES, Need.WINDOW, group=1))
    assert fleet.overlap() == {"a": 8}
    feed.apply(removed(HASHES[4:5], group=1), removed(HASHES[7:], group=1))
    assert fleet.overlap() == {"a": 7}
    feed.apply(removed(HASHES[6:7], group=1))
    assert fleet.overlap() == {"a": 4}


async def test_a_model_with_windows_alone_needs_no_full_prefix(fleet: Fleet) -> None:
    feed = fleet.feeds.by_worker["a"]
    feed.apply(stored(HASHES, Need.WINDOW), removed(HASHES[:5]))
    assert fleet.overlap() == {"a": 8}


async def test_an_identical_prompt_follows_on_models_with_windows_too(fleet: Fleet) -> None:
    feed = fleet.feeds.by_worker["a"]
    feed.apply(stored(HASHES[:2]), stored(HASHES[:2], Need.WINDOW, group=1))
    await fleet.router.roster.remove(WorkerId("b"))
    fleet.router.route(fleet.request())
    # Of a window's blocks only those are kept that a repeated prompt needs.
    assert fleet.overlap() == {"a": 7}


async def test_hashes_given_with_a_request_are_not_computed_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = fleet.request()
    hashes = fleet.router.hash(one)
    monkeypatch.setattr(BlockHasher, "hash", None)
    assert fleet.router.route(replace(one, hashes=hashes)).prompt_blocks == 8

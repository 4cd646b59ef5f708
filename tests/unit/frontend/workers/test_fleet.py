"""Who gets into the fleet, with a watcher of our own and a worker that answers."""

import asyncio
import errno
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import pytest
import zmq
import zmq.asyncio
from prometheus_client import REGISTRY
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from backend_worker.engine.vllm_engine import Items
from common.discovery.base import CardGone, CardPresent, CardRefused
from common.errors import (
    CardError,
    DiscoveryError,
    NoWorkerError,
    WorkerLeftError,
    WorkerLostError,
)
from common.identity import BlockHash, Incarnation, MmHash, RequestId, Target, WorkerId
from common.observability.fleet_events import What, recent
from common.observability.telemetry import INTERNAL_ERRORS, REFUSED_CARDS, TASK_FAILURES
from common.request_plane.card import Adapter, HostIdentity, WorkerCard, WorkerState
from common.request_plane.protocol import Coming, Output, Status, Submit, Terms
from common.request_plane.step_sums import RankStatus
from common.transfer.handshake import TransferReply
from frontend.router import LoraKey, RoutingRequest
from frontend.router.ejection import Circuit
from frontend.workers import contract, members, tell_refused
from frontend.workers.link import WorkerLink
from frontend.workers.members import Member
from tests.fakes.cards import make_card
from tests.fakes.engine import output
from tests.fakes.fleet import Town, gone
from tests.waiting import until

W0 = WorkerId("w0")
PICTURE = MmHash("picture")


def shown(state: str) -> float | None:
    return REGISTRY.get_sample_value("mmrouter_workers", {"state": state})


@pytest.fixture
async def town() -> AsyncIterator[Town]:
    town = Town()
    yield town
    await town.close()


async def test_nobody_is_there_at_first(town: Town) -> None:
    assert not town.fleet.connected
    with pytest.raises(NoWorkerError, match="none has registered"):
        town.fleet.check_available()


async def test_a_refused_worker_says_so_on_its_log(
    town: Town, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "TELL_S", 0.05)
    telling = asyncio.create_task(tell_refused(town.fleet.refusals.notices, "f (process 1)", None))
    card = town.card(vllm_version="0.1.0\n")
    town.news.say(CardPresent(card))
    town.news.say(CardPresent(town.card("of-another-run", incarnation="i9", vllm_version="0.2.0")))
    line = "frontend f (process 1) refuses this worker and sends it no requests: "
    try:
        await until(lambda: line in caplog.text)
        said = [record.message for record in caplog.records if line in record.message]
        assert len(said) == 1, "once a minute, however often it is told"
        assert "vllm_version" in said[0] and "\n" not in said[0]
        town.news.say(gone(card))
        await until(lambda: len(list(town.fleet.refusals.notices())) == 1)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def test_each_refused_worker_is_told_however_many_there_are(
    town: Town, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first 64 were, at once; the others looked for their mistake in vain."""
    monkeypatch.setattr(contract, "TELL_S", 0.05)
    monkeypatch.setattr(contract, "LEAVE_S", 0.02)
    for n in range(70):
        odd = town.card(f"odd{n}", incarnation=f"i{n}", vllm_version="0.1.0")
        town.news.say(CardPresent(odd.model_copy(update={"request_endpoint": "tcp://127.0.0.1:1"})))
    town.news.say(CardPresent(town.card("last", vllm_version="0.1.0")))
    await until(lambda: len(town.fleet.refusals.by_worker()) == 71)
    telling = asyncio.create_task(tell_refused(town.fleet.refusals.notices, "f", None))
    try:
        await until(lambda: "frontend f refuses this worker" in caplog.text)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def test_a_worker_that_was_accepted_meanwhile_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round over thousands of refused workers takes minutes."""
    monkeypatch.setattr(contract, "LEAVE_S", 0.02)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as worker:
        worker.linger = 0
        endpoint = f"tcp://127.0.0.1:{worker.bind_to_random_port('tcp://127.0.0.1')}"
        accepted, refused = (
            contract.Notice(members.Run(W0, Incarnation(name)), endpoint, "it does not fit")
            for name in ("accepted", "refused")
        )
        rounds = iter([[accepted, refused]])
        telling = asyncio.create_task(tell_refused(lambda: next(rounds, [refused]), "f", None))
        try:
            frames = await asyncio.wait_for(worker.recv_multipart(), 60)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
    assert b"refused" in frames[-1] and b"accepted" not in frames[-1]


async def test_a_card_of_which_anybody_may_be_the_author_tells_no_place(town: Town) -> None:
    town.news.say(CardPresent(town.card(fleet_key="0123456789abcdef")))
    await until(lambda: bool(town.fleet.refusals.by_worker()))
    assert not list(town.fleet.refusals.notices())


async def test_a_worker_joins_and_leaves(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    town.news.say(CardPresent(town.card()))
    assert (await town.fleet.contract.card()).worker_id == "w0"
    await until(lambda: town.fleet.connected)
    assert town.fleet.link(WorkerId("w0")).card == town.card()
    assert town.router.roster.targets()
    town.news.say(gone(town.card()))
    await town.worker.close()
    await until(lambda: not town.fleet.members.shown())
    assert not town.fleet.connected
    assert town.router.roster.targets() == []
    with pytest.raises(WorkerLostError):
        town.fleet.link(WorkerId("w0"))
    # Its keeper gives up the name as the last thing that it does.
    await until(lambda: not town.fleet.members.names)
    (departure,) = town.fleet.members.departures.recent()
    assert departure.left and departure.reason == "it is shutting down"
    assert "worker w0 is leaving: it is shutting down" in caplog.text
    assert "lost" not in caplog.text


async def test_a_worker_whose_link_lives_stays_whatever_became_of_its_card(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    link = town.fleet.link(WorkerId("w0"))
    town.news.say(gone(town.card()))
    (member,) = town.fleet.members.shown()
    await until(lambda: not member.present)
    assert town.fleet.link(WorkerId("w0")) is link and town.router.roster.targets()
    # Its card comes back, and goes again; then the link is lost as well.
    town.news.say(CardPresent(town.card()))
    await until(lambda: member.present)
    assert town.fleet.link(WorkerId("w0")) is link
    link._lose("for the test")
    await until(lambda: town.fleet.connected and town.fleet.link(WorkerId("w0")) is not link)
    assert member.gone is None and not town.fleet.members.departures.recent()
    town.news.say(gone(town.card()))
    await until(lambda: not member.present)
    town.fleet.link(WorkerId("w0"))._lose("for the test")
    await until(lambda: not town.fleet.members.shown())
    assert town.router.roster.targets() == []
    (departure,) = town.fleet.members.departures.recent()
    assert not departure.left and departure.reason == "for the test"
    # Not only once discovery says something again.
    assert shown("connected") == 0
    assert shown("disconnected") == 0


async def test_a_worker_that_comes_back_is_not_gone(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    departures = town.fleet.members.departures
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    old = town.card()
    town.news.say(gone(old))
    town.fleet.link(W0)._lose("for the test")
    await until(lambda: bool(departures.recent()))
    monkeypatch.setattr(members, "DEPARTURES_SHOWN_S", 0.0)
    assert not departures.recent(), "for an hour"
    monkeypatch.undo()
    town.worker = town.start("i1")
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    assert not departures.recent()


async def test_a_run_that_is_lost_after_its_successor_has_come_is_not_missed(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    link = await told(town)
    old = town.card()
    link._lose("for the test")
    await until(lambda: not town.fleet.connected)
    await town.worker.close()
    town.worker = town.start("i1")
    town.news.say(CardPresent(town.card()))
    await connected_again(town, link)
    town.news.say(gone(old))
    await until(lambda: len(town.fleet.members) == 1)
    assert not town.fleet.members.departures.recent()


async def test_adapters_come_and_go_with_their_worker(town: Town) -> None:
    story = Adapter(name="story", path="/s")
    card = town.card(adapters=[story])
    town.news.say(CardPresent(card))
    await until(lambda: "story" in town.fleet.adapters.requests)
    key = LoraKey("story", "/s")
    asked = RoutingRequest(RequestId("1"), [1, 2], lora=key)
    assert town.router.route(asked).worker_id == "w0"
    # It still serves, with other words on its card, as when it drains.
    town.news.say(CardPresent(card.model_copy(update={"adapters": []})))
    town.news.say(CardPresent(card.model_copy(update={"state": WorkerState.DRAINING})))
    await until(lambda: not town.fleet.adapters.requests)
    assert not town.fleet.connected


async def test_a_worker_without_a_link_goes_with_its_card(town: Town) -> None:
    card = make_card("nobody")
    town.news.say(CardPresent(card))
    await until(town.fleet.members.shown)
    town.news.say(gone(card))
    await until(lambda: not town.fleet.members.shown())
    await until(lambda: not town.fleet._keeper._tasks and not town.fleet.members.names)


async def test_another_version_of_vllm_never_becomes_the_contract(town: Town) -> None:
    town.news.say(CardPresent(town.card("old", vllm_version="0.31.0")))
    await until(lambda: bool(town.fleet.refusals.by_worker()))
    assert "vllm_version" in town.fleet.refusals.by_worker()[WorkerId("old")]
    with pytest.raises(NoWorkerError, match=r"1 refused"):
        town.fleet.check_available()
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)


async def test_the_second_card_must_agree_with_the_first(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    town.news.say(CardPresent(town.card("w1", cache={"block_size": 16})))
    await until(lambda: bool(town.fleet.refusals.by_worker()))
    assert "cache.block_size is 16" in town.fleet.refusals.by_worker()[WorkerId("w1")]
    town.news.say(CardGone(WorkerId("w1"), Incarnation("i0")))
    await until(lambda: not town.fleet.refusals.by_worker())


@pytest.mark.parametrize("endpoint", ["ipc://", "ipc:///" + "x" * 200, "tcp://localhost:5"])
async def test_an_endpoint_that_is_none_is_said_in_a_sentence(
    town: Town, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = TASK_FAILURES.labels("worker keeper")._value.get()
    town.news.say(CardPresent(make_card("odd", request_endpoint=endpoint)))
    await until(lambda: "worker odd can't be connected to at" in caplog.text)
    assert TASK_FAILURES.labels("worker keeper")._value.get() == before
    assert not any(record.exc_info for record in caplog.records)
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)


async def test_a_draining_worker_gets_no_more_requests_but_keeps_its_link(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    town.news.say(CardPresent(town.card(state=WorkerState.DRAINING)))
    await until(lambda: not town.fleet.connected)
    assert town.router.roster.targets() == []
    (member,) = town.fleet.members.shown()
    assert member.link is not None


async def test_a_worker_that_restarts_in_place_is_a_new_one(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.serving() == "i0")
    await town.worker.close()
    successor = town.start("i1")
    town.news.say(CardPresent(successor.card()))
    # At once, though the old card is still there: nobody waits for its lease to end.
    await until(lambda: town.serving() == "i1")
    assert town.router.ejection.circuit(WorkerId("w0"))[0] is Circuit.CLOSED
    assert not town.fleet.refusals.by_worker()
    town.news.say(gone(town.card()))
    await until(lambda: len(town.fleet.members) == 1)
    assert town.serving() == "i1"


async def test_a_successor_serves_while_its_predecessor_finishes(town: Town) -> None:
    """A rolling restart under one worker id, at the moment when both are there."""
    go_on = asyncio.Event()

    async def slow(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("a", finished=False)
        await go_on.wait()
        yield output("b", finished=True)

    old = town.worker
    old.engine.script = slow
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.serving() == "i0")
    link = town.fleet.link(WorkerId("w0"))

    async def ask() -> list[str]:
        answers = link.dispatch(Submit(RequestId("r"), [1], SamplingParams(), [], []), [])
        async with asyncio.timeout(60), aclosing(answers):
            return [one.outputs[0].text async for one in answers if isinstance(one, Output)]

    asking = asyncio.create_task(ask())
    await until(lambda: old.engine.running)

    new = town.start("i1")
    town.news.say(CardPresent(new.card()))
    town.news.say(CardPresent(town.card(state=WorkerState.DRAINING)))
    # Also when the old card goes before the old link.
    draining = asyncio.create_task(old.service.drain())
    town.news.say(gone(town.card()))
    await until(lambda: town.serving() == "i1")
    assert town.fleet.link(WorkerId("w0")) is not link
    go_on.set()
    assert await asking == ["a", "b"]
    await draining
    await old.close()
    await until(lambda: [each.card.incarnation for each in town.fleet.members.shown()] == ["i1"])
    assert town.serving() == "i1" and not town.fleet.refusals.by_worker()
    assert town.media_sender.transport(WorkerId("w0")) is not None


async def test_what_a_predecessor_says_of_its_transports_is_not_the_successors(town: Town) -> None:
    """It answers late to an offer while it drains. Nothing would go by shared memory to the
    successor, or everything by a way that it doesn't have."""
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.serving() == "i0")
    former = town.fleet.link(WorkerId("w0"))
    town.news.say(CardPresent(town.card(state=WorkerState.DRAINING)))
    successor = town.start("i1")
    town.news.say(CardPresent(successor.card()))
    await until(lambda: town.serving() == "i1")
    terms = town.media_sender._workers[WorkerId("w0")].terms
    (session,) = town.worker.service._sessions.values()
    late = TransferReply(shm=not terms.shm, nixl="an agent that has ended")
    await town.worker.service._send(session, Terms(late.model_dump_json().encode()))
    # Whoever has read what was sent after the terms has read these.
    seen: list[object] = []
    former._on_status = seen.append
    await until(lambda: len(seen) > 1)
    assert town.media_sender._workers[WorkerId("w0")].terms == terms


async def test_of_two_living_workers_under_one_id_the_first_serves_and_the_other_is_named(
    town: Town,
) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.serving() == "i0")
    counted = REFUSED_CARDS.labels("worker_id")._value.get()
    other = town.start("i1")
    town.news.say(CardPresent(other.card(host=HostIdentity(hostname="there", pid=77))))
    await until(town.fleet.refusals.by_worker)
    reason = town.fleet.refusals.by_worker()[WorkerId("w0")]
    assert "process 77 on there" in reason and "process 1 on here" in reason
    assert "--worker-id" in reason
    assert REFUSED_CARDS.labels("worker_id")._value.get() == counted + 1
    assert shown("refused") == 1
    assert town.serving() == "i0" and len(town.fleet.members.shown()) == 1
    # Once the first is gone, the other serves, and needs nobody to say so.
    await town.worker.close()
    await until(lambda: town.serving() == "i1")
    assert not town.fleet.refusals.by_worker()
    # And if the first is there again, it waits in turn.
    again = town.start("i2")
    town.news.say(CardPresent(again.card()))
    await until(town.fleet.refusals.by_worker)
    assert town.serving() == "i1"
    town.news.say(gone(again.card()))
    await until(lambda: not town.fleet.refusals.by_worker())
    removed = [each.reason for each in recent() if each.what is What.REMOVED]
    assert removed[-1].startswith("the refused process 1 on here of the same worker id")
    assert removed[-1].endswith("; w0 itself serves on (its card is gone)")


async def test_a_worker_that_stood_still_does_not_push_its_successor_out(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.serving() == "i0")
    town.fleet.link(WorkerId("w0"))._lose("silent", WorkerLostError)
    new = town.start("i1")
    town.news.say(CardPresent(new.card()))
    await until(lambda: town.fleet.connected)
    # Whoever was first, only one of them serves, and the other is told of.
    await until(lambda: town.serving() is not None)
    await until(town.fleet.refusals.by_worker)
    assert len(town.fleet.members.shown()) == 1


async def test_code_of_a_model_runs_here_only_if_this_frontend_says_so(town: Town) -> None:
    card = town.card(model={"trust_remote_code": True})
    town.news.say(CardPresent(card))
    await until(town.fleet.refusals.by_worker)
    assert "--trust-remote-code" in town.fleet.refusals.by_worker()[WorkerId("w0")]
    assert town.fleet.contract.first is None, "or its model would be loaded"
    trusting = Town(trust_remote_code=True)
    try:
        trusting.news.say(CardPresent(trusting.card(model={"trust_remote_code": True})))
        await until(lambda: trusting.fleet.connected)
        # Nor does the flag of the frontend make code run that workers don't run.
        trusting.news.say(CardPresent(trusting.card("w1")))
        await until(trusting.fleet.refusals.by_worker)
    finally:
        await trusting.close()


async def test_a_card_that_can_not_be_read_is_named_until_it_is_gone(town: Town) -> None:
    town.news.say(CardRefused(WorkerId("odd"), Incarnation("i0"), CardError("malformed card: x")))
    await until(town.fleet.refusals.by_worker)
    with pytest.raises(NoWorkerError, match="1 refused"):
        town.fleet.check_available()
    town.news.say(CardGone(WorkerId("odd"), Incarnation("i0")))
    await until(lambda: not town.fleet.refusals.by_worker())


async def test_a_card_that_is_refused_again_and_again_is_one_event(town: Town) -> None:
    for _ in range(3):
        town.news.say(CardPresent(town.card("odd-one", vllm_version="0.31.0")))
    town.news.say(CardPresent(town.card("odd-two", vllm_version="0.31.0")))
    await until(lambda: len(town.fleet.refusals.by_worker()) == 2)
    events = [each for each in recent() if each.worker_id == "odd-one"]
    assert [each.what for each in events] == [What.REFUSED]
    assert "0.31.0" in events[0].reason


async def test_of_those_that_are_refused_a_user_hears_how_many(town: Town) -> None:
    for number in range(100):
        town.news.say(CardPresent(town.card(f"w{number}", vllm_version="0.31.0")))
    await until(lambda: len(town.fleet.refusals.by_worker()) == 100)
    with pytest.raises(NoWorkerError, match=r"100 refused") as caught:
        town.fleet.check_available()
    assert "0.31.0" not in str(caught.value), "that is for operators"


async def test_a_card_that_is_right_again_is_refused_no_more(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    town.news.say(gone(town.card()))  # its lease ended, its link lives
    town.news.say(CardRefused(WorkerId("w0"), Incarnation("i0"), CardError("malformed card: x")))
    await until(town.fleet.refusals.by_worker)
    town.news.say(CardPresent(town.card()))
    await until(lambda: not town.fleet.refusals.by_worker())


async def test_terms_of_a_worker_that_left_its_name_change_nothing_of_its_successors(
    town: Town,
) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.serving() == "i0")
    old = town.fleet.link(WorkerId("w0"))
    town.news.say(CardPresent(town.card(state=WorkerState.DRAINING)))
    await until(lambda: not town.fleet.connected)
    town.news.say(CardPresent(town.start("i1").card()))
    await until(lambda: town.serving() == "i1")
    way = town.media_sender.transport(WorkerId("w0"))
    old._on_terms(TransferReply(shm=True).model_dump_json().encode())
    assert town.media_sender.transport(WorkerId("w0")) == way == "inline"


# Errors that nobody expects


async def test_too_many_open_files_when_connecting_are_survived(
    town: Town, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("frontend.workers.fleet.RECONNECT_S", 0.01)
    before = TASK_FAILURES.labels("worker keeper")._value.get()
    with monkeypatch.context() as patch:
        full = OSError(errno.EMFILE, "Too many open files")
        patch.setattr("frontend.workers.fleet.WorkerLink", raises(full))
        town.news.say(CardPresent(town.card()))
        await until(lambda: TASK_FAILURES.labels("worker keeper")._value.get() >= before + 2)
        # Discovery goes on meanwhile.
        town.news.say(CardPresent(town.card("w1")))
        await until(lambda: len(town.fleet.members.shown()) == 2)
        town.news.say(CardGone(WorkerId("w1"), Incarnation("i0")))
        await until(lambda: len(town.fleet.members.shown()) == 1)
        assert not town.following.done()
    assert any(record.exc_info for record in caplog.records), "with its trace"
    await until(lambda: town.fleet.connected)


async def test_a_link_that_can_not_be_had_whole_leaves_no_socket(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[zmq.Socket[bytes]] = []

    def fails(socket: zmq.Socket[bytes], *_: object, **__: object) -> None:
        made.append(socket)
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "get_monitor_socket", fails)
        town.news.say(CardPresent(town.card()))
        await until(lambda: made)
    assert all(socket.closed for socket in made)
    await until(lambda: town.fleet.connected)


async def test_a_mistake_of_ours_about_one_card_keeps_no_other_worker_out(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(card: WorkerCard, _: object) -> None:
        if card.worker_id == "w1":
            raise LookupError("a mistake")

    monkeypatch.setattr("frontend.workers.contract.check_card", check)
    before = INTERNAL_ERRORS.labels("discovery")._value.get()
    town.news.say(CardPresent(town.card("w1")))
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    assert INTERNAL_ERRORS.labels("discovery")._value.get() == before + 1


async def test_discovery_that_fails_is_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.aio.supervised.FIRST_PAUSE_S", 0.01)
    town = Town()
    try:
        town.news.fail(RuntimeError("a mistake"))
        town.news.say(CardPresent(town.card()))
        await until(lambda: town.fleet.connected)
        town.news.fail(DiscoveryError("strangers could have written the cards"))
        with pytest.raises(DiscoveryError):
            await town.following
    finally:
        await town.close()


async def test_no_one_waits_for_a_link_that_closes_slowly(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()
    real = WorkerLink.close

    async def slow(link: WorkerLink, reason: str = "") -> None:
        closing.set()
        await may_close.wait()
        await real(link, reason)

    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    monkeypatch.setattr(WorkerLink, "close", slow)
    town.fleet.link(WorkerId("w0"))._lose("for the test")
    await closing.wait()
    town.news.say(gone(town.card()))
    await until(lambda: not town.fleet.members.shown())
    new = town.start("i1")
    town.news.say(CardPresent(new.card()))
    await until(lambda: town.serving() == "i1")
    may_close.set()
    await until(lambda: len(town.fleet._keeper._tasks) == 1)
    assert town.serving() == "i1" and town.media_sender.transport(WorkerId("w0")) is not None


@pytest.mark.parametrize("task", ["_read", "_keep_time", "_watch_connection"])
async def test_a_link_one_of_whose_tasks_fails_is_lost_and_opened_again(
    town: Town, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    async def fails(_: WorkerLink) -> None:
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(WorkerLink, task, fails)
        town.news.say(CardPresent(town.card()))
        (member,) = await members_of(town)
        await until(lambda: member.joined > float("-inf"))
        await until(lambda: member.link is None)
    await until(lambda: town.fleet.connected)


async def members_of(town: Town) -> list[Member]:
    await until(town.fleet.members.shown)
    return town.fleet.members.shown()


def raises(error: Exception) -> Callable[..., WorkerLink]:
    def fails(*_: object, **__: object) -> WorkerLink:
        raise error

    return fails


async def test_a_lost_worker_is_connected_again(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    link = town.fleet.link(WorkerId("w0"))
    link._lose("for the test")
    await until(lambda: not town.fleet.connected)
    await until(lambda: town.fleet.connected)
    assert town.fleet.link(WorkerId("w0")) is not link


async def test_a_worker_that_forgot_our_session_is_connected_again(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    link = town.fleet.link(WorkerId("w0"))
    (session,) = town.worker.service._sessions.values()
    await town.worker.service._end_session(session)
    lost = await asyncio.wait_for(link.lost(), 60)
    assert isinstance(lost, WorkerLeftError) and "no session for this frontend" in str(lost)
    await connected_again(town, link)


async def test_after_a_silence_of_ours_we_are_told_so_and_media_stay_where_they_are(
    town: Town,
) -> None:
    """As after a pause of ours that was longer than the worker waits: its engine ran on."""
    town.news.say(CardPresent(town.card()))
    link = await told(town)
    town.router.roster.media.acked(W0, [PICTURE])
    await fall_silent(town, link)
    assert town.router.roster.media.holds(W0, PICTURE)
    await told(town)
    assert town.router.roster.media.holds(W0, PICTURE)


async def test_media_that_an_operator_had_forgotten_during_a_silence_of_ours_are_gone(
    town: Town,
) -> None:
    town.news.say(CardPresent(town.card()))
    link = await told(town)
    town.router.roster.media.acked(W0, [PICTURE])
    town.worker.service._operations.media_emptied += 1
    await fall_silent(town, link)
    await told(town)
    assert not town.router.roster.media.holds(W0, PICTURE)


async def test_a_successor_holds_no_media_of_its_predecessor(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    link = await told(town)
    town.router.roster.media.acked(W0, [PICTURE])
    old = town.card()
    await town.worker.close()
    await until(lambda: not town.fleet.connected)
    town.worker = town.start("i1")
    town.news.say(CardPresent(town.card()))
    town.news.say(gone(old))
    await connected_again(town, link)
    assert not town.router.roster.media.holds(W0, PICTURE)


async def told(town: Town) -> WorkerLink:
    """The link to the worker, once it has said how it is."""
    await until(lambda: town.fleet.connected)
    (member,) = [each for each in town.fleet.members.shown() if each.link is not None]
    await until(lambda: member.status is not None)
    return town.fleet.link(W0)


async def fall_silent(town: Town, link: WorkerLink) -> None:
    """Let the worker take us for silent, and connect again."""
    (session,) = town.worker.service._sessions.values()
    session.last_heard = float("-inf")
    lost = await asyncio.wait_for(link.lost(), 60)
    assert isinstance(lost, WorkerLeftError)
    assert "heard nothing from this frontend for 15 s" in str(lost)
    await connected_again(town, link)


async def connected_again(town: Town, former: WorkerLink) -> None:
    def connected() -> bool:
        return town.fleet.connected and town.fleet.link(W0) is not former

    await until(connected)


async def test_a_lost_worker_is_not_trusted_at_once_and_one_that_left_is(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    for kind, circuit in (
        (WorkerLeftError, (Circuit.CLOSED, "")),
        (WorkerLostError, (Circuit.OPEN, "link lost")),
    ):
        link = town.fleet.link(WorkerId("w0"))
        link._lose("for the test", kind)
        await until(lambda: not town.fleet.connected)
        assert town.router.ejection.circuit(WorkerId("w0")) == circuit
        await until(lambda: town.fleet.connected)


async def test_a_draining_worker_that_is_connected_again_still_gets_nothing(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    town.news.say(CardPresent(town.card(state=WorkerState.DRAINING)))
    await until(lambda: not town.fleet.connected)
    (member,) = town.fleet.members.shown()
    link = member.link
    assert link is not None
    link._lose("for the test")
    await until(lambda: member.link not in (None, link))
    assert town.router.roster.targets() == []


async def test_a_worker_of_which_somebody_else_wrote_that_it_drains_serves_again(
    town: Town,
) -> None:
    """It puts its card right, and goes on as if nothing had been."""
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    town.news.say(CardPresent(town.card(state=WorkerState.DRAINING)))
    await until(lambda: not town.fleet.connected)
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    assert town.router.roster.targets()
    assert len(town.fleet.members) == 1


async def test_a_closed_fleet_says_that_it_is_closed(town: Town) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    await town.fleet.close()
    with pytest.raises(NoWorkerError, match="shutting down"):
        town.fleet.check_available()


async def test_a_draining_frontend_whose_last_card_is_gone_waits_for_no_worker(town: Town) -> None:
    """Requests waited for --worker-wait, though their launcher had no worker left."""
    card = town.card()
    town.news.say(CardPresent(card))
    await until(lambda: town.fleet.connected)
    town.fleet.draining = True
    assert not town.fleet.closed
    town.news.say(gone(card))
    await town.worker.close()
    await until(lambda: town.fleet.closed)


async def test_what_a_rank_has_is_shown_while_its_worker_serves(town: Town) -> None:
    def shown(whose: str) -> float | None:
        labels = {"worker_id": "w0", "rank": "0", "whose": whose}
        return REGISTRY.get_sample_value("mmrouter_rank_requests", labels)

    town.news.say(CardPresent(town.card()))
    await until(lambda: (shown("own"), shown("others")) == (0, 0))
    town.news.say(gone(town.card()))
    await town.worker.close()
    await until(lambda: (shown("own"), shown("others")) == (None, None))


async def test_of_what_others_sent_no_more_is_noted_than_there_is_time_for(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    town.news.say(CardPresent(town.card()))
    await until(lambda: town.fleet.connected)
    (member,) = town.fleet.members.shown()
    sent = [Coming(0, [BlockHash(bytes([number]))], []) for number in range(3)]
    status = Status([RankStatus(0, 0, 0, 0.0, 0, 0, 0)], 0, sent)
    predicted = town.router.roster.indexes.predicted
    monkeypatch.setattr(members, "OTHERS_S", -1.0)
    town.fleet._serving.reported(member, status)
    assert predicted.index.match([BlockHash(b"\2")]) == {Target(WorkerId("w0"), 0): 1}
    assert predicted.blocks == 1
    monkeypatch.setattr(members, "OTHERS_S", 60.0)
    town.fleet._serving.reported(member, status)
    assert predicted.blocks == 1 + len(sent)

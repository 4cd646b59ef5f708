"""Both ends of the request plane over real sockets, with an engine of our own."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import torch
import zmq.asyncio
from vllm.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from backend_worker.engine.vllm_engine import Items
from backend_worker.plane.media_receiver import ReceivedMedia
from common.errors import (
    EngineFailedError,
    MediaMissingError,
    RequestRejectedError,
    WorkerDiedError,
    WorkerLostError,
)
from common.identity import Incarnation, MmHash, RequestId
from common.request_plane import wire
from common.request_plane.protocol import (
    Ack,
    Failed,
    FailureKind,
    Nack,
    Output,
    Submit,
    ToFrontend,
)
from frontend.workers.link import WorkerLink
from tests.fakes.cards import make_card
from tests.fakes.engine import never, output
from tests.fakes.plane import Plane, collect, media, open_plane
from tests.waiting import until

WITHOUT_MEDIA = pytest.mark.parametrize("plane", ["inline"], indirect=True)


@pytest.fixture(params=["shm", "nixl", "inline"])
async def plane(request: pytest.FixtureRequest) -> AsyncIterator[Plane]:
    async with open_plane(request.param) as plane:
        yield plane


@WITHOUT_MEDIA
async def test_a_text_request_is_acked_and_streams(plane: Plane) -> None:
    ack, first, last = await collect(plane.dispatch())
    assert ack == Ack(RequestId("r"), [])
    assert isinstance(first, Output) and first.outputs[0].text == "a" and not first.finished
    assert isinstance(last, Output) and last.outputs[0].text == "b" and last.finished
    assert last.num_cached_tokens == 3
    await until(lambda: plane.service.active_requests == 0)
    assert plane.link.active_requests == 0


async def test_lent_media_arrive_and_come_back(plane: Plane) -> None:
    cat = media("cat", 7)
    answers = await collect(plane.dispatch(cat, handles=await plane.send(cat)))
    assert answers[0] == Ack(RequestId("r"), [MmHash("cat")])
    assert torch.equal(plane.engine.seen[0][MmHash("cat")], cat.item["pixels"].data)
    if plane.arena is not None:
        assert plane.leases() == 0


async def test_large_media_and_vectors_arrive_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    vector = torch.arange(5000.0)
    async with open_plane("inline") as plane:
        cat, dog = media("cat", 7), media("dog", 9)

        async def pooled(submit: Submit, items: Items) -> AsyncGenerator[PoolingRequestOutput]:
            yield PoolingRequestOutput("r", PoolingOutput(vector), [1], 0, finished=True)

        plane.engine.script = pooled
        answers = await collect(plane.dispatch(cat, dog, handles=await plane.send(cat, dog)))
        for item in (cat, dog):
            seen = plane.engine.seen[0][item.part.mm_hash]
            assert torch.equal(seen, item.item["pixels"].data)
        last = answers[-1]
        assert isinstance(last, Output) and last.pooled is not None
        assert torch.equal(last.pooled, vector)


async def test_what_the_worker_holds_is_not_sent(plane: Plane) -> None:
    cat = media("cat", 7)
    plane.engine.held.add(cat.part.mm_hash)
    answers = await collect(plane.dispatch(cat))
    assert not any(isinstance(answer, Nack | Failed) for answer in answers)
    assert plane.engine.seen == [{}]


async def test_what_it_lacks_it_asks_for_and_gets(plane: Plane) -> None:
    cat, dog = media("cat", 7), media("dog", 9)
    answers = []
    async with asyncio.timeout(60):
        async for answer in plane.dispatch(cat, dog, handles=await plane.send(cat)):
            answers.append(answer)
            if isinstance(answer, Nack):
                assert answer.missing == [dog.part.mm_hash]
                await plane.link.supply(answer.request_id, await plane.send(dog))
    assert isinstance(answers[0], Nack)
    assert isinstance(answers[-1], Output) and answers[-1].finished
    assert set(plane.engine.seen[-1]) == {"cat", "dog"}
    if plane.arena is not None:
        assert plane.leases() == 0


async def test_what_is_evicted_meanwhile_is_asked_for_all_at_once(plane: Plane) -> None:
    """Also what is still held: a worker whose cache is full may evict it before it has the rest."""
    animals = [media(name, 7) for name in ("cat", "dog", "bird", "cow", "hen", "fox")]
    names = [animal.part.mm_hash for animal in animals]

    async def evicting(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        if missing := [name for name in names if name not in items]:
            raise MediaMissingError(missing[:1], "evicted")
        yield output("fine", finished=True)

    plane.engine.script = evicting
    plane.engine.held.update(names)
    asked = []
    async with asyncio.timeout(60):
        async for answer in plane.dispatch(*animals, handles=[]):
            if isinstance(answer, Nack):
                asked.append(answer.missing)
                lacking = [each for each in animals if each.part.mm_hash in answer.missing]
                await plane.link.supply(answer.request_id, await plane.send(*lacking))
    assert asked == [names[:1], names[1:]]
    if plane.arena is not None:
        assert plane.leases() == 0


async def test_closing_the_answers_aborts_and_returns_the_handles(plane: Plane) -> None:
    plane.engine.script = never
    cat = media("cat", 7)
    answers = plane.dispatch(cat, handles=await plane.send(cat))
    waiting = asyncio.ensure_future(anext(answers))
    await until(lambda: plane.engine.running == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await answers.aclose()
    await until(lambda: plane.link.active_requests == 0)
    assert plane.engine.aborted == 1
    assert plane.engine.settled_calls == 1, "memory comes back only when nothing is in flight"
    if plane.arena is not None:
        assert plane.leases() == 0


async def test_a_request_that_ends_while_memory_is_given_back_waits_for_that(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the frontend would write there while the worker still looks at it."""
    began, go_on = asyncio.Event(), asyncio.Event()
    give_back = ReceivedMedia.give_back

    async def slow(received: ReceivedMedia) -> None:
        began.set()
        await go_on.wait()
        await give_back(received)

    monkeypatch.setattr(ReceivedMedia, "give_back", slow)
    cat = media("cat", 7)
    answers = plane.dispatch(cat, handles=await plane.send(cat))
    waiting = asyncio.ensure_future(anext(answers))
    await asyncio.wait_for(began.wait(), 60)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await answers.aclose()
    await until(lambda: plane.engine.aborted == 1)
    assert plane.service.active_requests == plane.link.active_requests == 1
    if plane.arena is not None:
        assert plane.leases() == 1
    go_on.set()
    await until(lambda: plane.service.active_requests == plane.link.active_requests == 0)
    if plane.arena is not None:
        assert plane.leases() == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestRejectedError("no"), FailureKind.INVALID),
        (EngineFailedError("broken"), FailureKind.ENGINE),
        (ValueError("ours"), FailureKind.ENGINE),
    ],
)
async def test_a_failure_has_a_kind_and_returns_the_handles(
    plane: Plane, error: Exception, kind: FailureKind
) -> None:
    async def failing(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        raise error
        yield

    plane.engine.script = failing
    cat = media("cat", 7)
    answers = await collect(plane.dispatch(cat, handles=await plane.send(cat)))
    failed = answers[-1]
    assert isinstance(failed, Failed) and failed.kind is kind
    assert str(error) in failed.message
    if plane.arena is not None:
        assert plane.leases() == 0


async def test_an_eviction_in_the_engine_is_retried_with_what_is_in_hand(plane: Plane) -> None:
    attempts = 0

    async def evicting(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            plane.engine.held.clear()
            raise MediaMissingError([MmHash("cat")], "engine_evicted")
        yield output("fine", finished=True)

    plane.engine.script = evicting
    cat = media("cat", 7)
    answers = await collect(plane.dispatch(cat, handles=await plane.send(cat)))
    assert [type(answer) for answer in answers] == [Ack, Output]
    assert attempts == 2


async def test_an_engine_that_never_keeps_media_ends_in_an_error(plane: Plane) -> None:
    async def evicting(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        raise MediaMissingError([MmHash("cat")], "engine_evicted")
        yield

    plane.engine.script = evicting
    cat = media("cat", 7)
    answers = await collect(plane.dispatch(cat, handles=await plane.send(cat)))
    failed = answers[-1]
    assert isinstance(failed, Failed) and failed.kind is FailureKind.MEDIA


async def test_a_worker_that_goes_away_loses_its_requests_and_returns_the_handles(
    plane: Plane,
) -> None:
    plane.engine.script = never
    cat = media("cat", 7)
    answers = plane.dispatch(cat, handles=await plane.send(cat))
    waiting = asyncio.ensure_future(anext(answers))
    await until(lambda: plane.engine.running == 1)
    await plane.service.close()
    with pytest.raises(WorkerLostError, match="shutting down"):
        await asyncio.wait_for(waiting, 60)
    assert isinstance(await plane.link.lost(), WorkerLostError)
    if plane.arena is not None:
        assert plane.leases() == 0


@WITHOUT_MEDIA
async def test_a_request_is_blamed_for_a_death_only_if_the_worker_lived_when_it_came(
    plane: Plane,
) -> None:
    plane.engine.script = never
    before = asyncio.ensure_future(anext(plane.dispatch(name="before")))
    await until(lambda: plane.engine.running == 1)
    dispatch = plane.link._dispatches[RequestId("before")]
    await until(lambda: plane.link._last_heard > dispatch.since)

    async def unsent(address: bytes, message: ToFrontend) -> bool:
        return True

    plane.service._send_now = unsent  # type: ignore[method-assign]
    after = asyncio.ensure_future(anext(plane.dispatch(name="after")))
    await until(lambda: plane.engine.running == 2)
    plane.link._lose("silent for long", WorkerDiedError)
    late = asyncio.ensure_future(anext(plane.dispatch(name="late")))
    for asking, deadly in ((before, True), (after, False), (late, False)):
        with pytest.raises(WorkerLostError, match="silent for long") as caught:
            await asking
        assert caught.value.may_be_deadly is deadly


@WITHOUT_MEDIA
async def test_a_worker_takes_nothing_more_once_its_engine_died(plane: Plane) -> None:
    plane.engine.errored = True
    failed = (await collect(plane.dispatch()))[-1]
    assert isinstance(failed, Failed) and failed.kind is FailureKind.BUSY


@WITHOUT_MEDIA
async def test_a_frontend_that_leaves_ends_its_requests_on_the_worker(plane: Plane) -> None:
    plane.engine.script = never
    waiting = asyncio.ensure_future(anext(plane.dispatch()))
    await until(lambda: plane.engine.running == 1)
    await plane.link.close()
    await until(lambda: plane.engine.running == 0)
    assert plane.engine.aborted == 1
    with pytest.raises(WorkerLostError):
        await waiting


async def test_a_frontend_that_vanishes_ends_its_requests_on_the_worker(plane: Plane) -> None:
    """As after a kill -9: no goodbye, only a closed connection."""
    plane.engine.script = never
    cat = media("cat", 7)
    waiting = asyncio.ensure_future(anext(plane.dispatch(cat, handles=await plane.send(cat))))
    await until(lambda: plane.engine.running == 1)
    for task in plane.link._tasks:
        task.cancel()
    await asyncio.gather(*plane.link._tasks, return_exceptions=True)
    plane.link._close_socket()
    await until(lambda: plane.engine.aborted == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_worker_stops_by_itself_what_is_late(plane: Plane) -> None:
    plane.engine.script = never
    cat = media("cat", 7)
    submit = Submit(RequestId("r"), [1, 2], SamplingParams(), [cat.part], [], timeout_s=1.0)
    answers = await collect(plane.link.dispatch(submit, await plane.send(cat)))
    failed = answers[-1]
    assert isinstance(failed, Failed) and failed.kind is FailureKind.LATE
    assert plane.engine.aborted == 1
    if plane.arena is not None:
        assert plane.leases() == 0


@WITHOUT_MEDIA
async def test_the_worker_says_how_busy_it_is(plane: Plane) -> None:
    await until(lambda: bool(plane.statuses))
    (rank,) = plane.statuses[-1].ranks
    assert (rank.rank, rank.running, rank.others_active) == (0, 0, 0)


@WITHOUT_MEDIA
async def test_another_incarnation_at_the_address_is_not_our_worker(plane: Plane) -> None:
    card = make_card(request_endpoint=plane.service.endpoint, incarnation="other")
    link = WorkerLink(card, plane.context, Incarnation("f2"), plane.statuses.append)
    with pytest.raises(WorkerLostError, match="no longer worker w0"):
        await link.open(plane.media_sender.offer())


@WITHOUT_MEDIA
async def test_nonsense_on_the_port_changes_nothing(plane: Plane) -> None:
    stranger = plane.context.socket(zmq.DEALER)
    stranger.connect(plane.service.endpoint)
    for frames in ([b""], [b"x"] * 3, [b"\1\0\0\0", b"junk"], [b"\xff" * 4, b""]):
        await stranger.send_multipart(frames)
    assert len(await collect(plane.dispatch())) == 3
    stranger.close(linger=0)

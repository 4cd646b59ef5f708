"""Frontends learn from a worker which prompts others sent there, before its engine has them."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq.asyncio
from vllm.sampling_params import SamplingParams

from backend_worker.plane import load_report as news
from backend_worker.plane import service as worker_service
from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.errors import ProtocolError, WorkerGarbledError
from common.identity import BlockHash, Incarnation, MmHash, RequestId, Target, WorkerId
from common.request_plane.protocol import (
    MAX_COMING,
    MAX_MM_HASH_LEN,
    MAX_NEW_BLOCKS,
    MAX_NEW_MEDIA,
    Coming,
    Failed,
    FailureKind,
    MediaPart,
    Status,
    Submit,
    ToFrontend,
)
from common.request_plane.step_sums import RankStatus
from common.request_plane.wire import Codec
from common.transfer.handshake import TransferOffer
from common.transfer.transports import receivers
from frontend.router import Router
from frontend.router.index import APPROXIMATE_TTL_S, Knowledge
from frontend.workers.dispatch import Answer
from frontend.workers.link import WorkerLink
from tests.fakes.cards import make_card
from tests.fakes.engine import ScriptedEngine, never, no_rendering
from tests.fakes.routing import Clock, request, worker
from tests.waiting import until

W0 = WorkerId("w0")


def blocks(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(32, "big")) for number in numbers]


class Frontend:
    """One frontend, and what it heard of others' prompts."""

    def __init__(self, name: str, service: WorkerService, context: zmq.asyncio.Context) -> None:
        card = make_card(request_endpoint=service.endpoint, ranks=[0])
        self.heard: list[Coming] = []
        self.greeted = asyncio.Event()
        self.link = WorkerLink(card, context, Incarnation(name), self._hear)
        self.last: Answer | None = None

    def _hear(self, status: Status) -> None:
        self.heard += status.coming
        self.greeted.set()

    async def run(self, name: str, new: list[BlockHash], *media: str) -> None:
        parts = [MediaPart("image", MmHash(one), at, 1, None) for at, one in enumerate(media)]
        submit = Submit(RequestId(name), [1] * 9, SamplingParams(), parts, [], new_blocks=new)
        async for answer in self.link.dispatch(submit, []):
            self.last = answer


class Plane:
    """A worker whose engine never answers, and its frontends."""

    def __init__(self) -> None:
        engine = ScriptedEngine()
        engine.script = never
        self.service = WorkerService(
            engine,
            MediaReceiver(receivers(no_rendering, None)),
            W0,
            Incarnation("i0"),
            "tcp://127.0.0.1:0",
        )
        self.context = zmq.asyncio.Context()
        self.frontends: list[Frontend] = []
        self.tasks = [asyncio.create_task(self.service.run())]

    async def frontend(self, name: str) -> Frontend:
        frontend = Frontend(name, self.service, self.context)
        self.frontends.append(frontend)
        await frontend.link.open(TransferOffer().model_dump_json().encode())
        await asyncio.wait_for(frontend.greeted.wait(), 60)
        return frontend

    def start(self, frontend: Frontend, name: str, new: list[BlockHash], *media: str) -> None:
        self.tasks.append(asyncio.create_task(frontend.run(name, new, *media)))

    async def tell(self, name: str) -> None:
        """As the clock does."""
        (session,) = (one for one in self.service._sessions.values() if one.frontend_id == name)
        await self.service._tell(session)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for frontend in self.frontends:
            await frontend.link.close()
        await self.service.close()
        self.context.destroy(linger=0)


@pytest.fixture
async def plane(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plane]:
    # The clock stands still: what is heard is news, not the regular report.
    monkeypatch.setattr(worker_service, "PING_INTERVAL_S", 3600.0)
    made = Plane()
    yield made
    await made.close()


async def test_all_others_hear_of_a_prompt_once_and_its_sender_never(plane: Plane) -> None:
    a, b, c = [await plane.frontend(name) for name in "abc"]
    plane.start(a, "one", blocks(1, 2), "cat", "dog")
    one = Coming(0, blocks(1, 2), [MmHash("cat"), MmHash("dog")])
    await until(lambda: b.heard == c.heard == [one])
    plane.start(b, "two", blocks(3))
    two = Coming(0, blocks(3), [])
    await until(lambda: a.heard == [two] and c.heard == [one, two])
    assert b.heard == [one]


async def test_of_a_burst_the_last_prompts_are_told(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "REPORT_PAUSE_S", 3600.0)
    a, b = await plane.frontend("a"), await plane.frontend("b")
    plane.start(a, "first", blocks(0))
    await until(lambda: len(b.heard) == 1)  # from now on nothing is told
    count = 2 * MAX_COMING
    for number in range(1, count):
        plane.start(a, str(number), blocks(number))
    await until(lambda: plane.service.active_requests == count)
    await plane.tell("b")
    await until(lambda: len(b.heard) > 1)
    assert [one.new_blocks for one in b.heard[1:]] == [
        blocks(number) for number in range(count - MAX_COMING, count)
    ]


async def test_of_many_media_and_long_names_others_hear_little(plane: Plane) -> None:
    a, b = await plane.frontend("a"), await plane.frontend("b")
    names = [str(number) for number in range(1000)]
    plane.start(a, "many", [], "x" * (MAX_MM_HASH_LEN + 1), "0", "0", *names)
    await until(lambda: bool(b.heard))
    ((_, new, media),) = (msgspec.structs.astuple(one) for one in b.heard)
    assert new == [] and media == names[: MAX_NEW_MEDIA - 2]


async def test_a_request_that_brings_nothing_pushes_no_other_out(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "REPORT_PAUSE_S", 3600.0)
    a, b = await plane.frontend("a"), await plane.frontend("b")
    plane.start(a, "first", [])
    await until(lambda: plane.service.active_requests == 1)
    plane.start(a, "new", blocks(1))
    await until(lambda: plane.service.active_requests == 2)
    for number in range(2 * MAX_COMING):
        plane.start(a, str(number), [])
    await until(lambda: plane.service.active_requests == 2 + 2 * MAX_COMING)
    await plane.tell("b")
    await until(lambda: bool(b.heard))
    assert b.heard == [Coming(0, blocks(1), [])]


async def test_what_was_not_sent_for_lack_of_room_is_told_with_the_next_report(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await plane.frontend("a"), await plane.frontend("b")
    room = asyncio.Event()
    tries: list[object] = []
    send = plane.service._send_now

    async def full(address: bytes, message: ToFrontend) -> bool:
        tries.append(message)
        return room.is_set() and await send(address, message)

    monkeypatch.setattr(plane.service, "_send_now", full)
    plane.start(a, "0", blocks(0))
    await until(lambda: any(isinstance(one, Status) and one.coming for one in tries))
    for number in range(1, MAX_COMING + 1):
        plane.start(a, str(number), blocks(number))
    await until(lambda: plane.service.active_requests > MAX_COMING)
    room.set()
    await plane.tell("b")
    await until(lambda: len(b.heard) == MAX_COMING)
    assert [one.new_blocks for one in b.heard] == [
        blocks(number) for number in range(1, MAX_COMING + 1)
    ]


@pytest.mark.parametrize(
    "new", [blocks(*range(MAX_NEW_BLOCKS + 1)), [b"x" * 65], [b""], ["text"], [None], 7]
)
async def test_blocks_that_are_none_fail_their_request_alone(plane: Plane, new: object) -> None:
    a, b = await plane.frontend("a"), await plane.frontend("b")
    await a.run("bad", new)  # type: ignore[arg-type]
    assert isinstance(a.last, Failed) and a.last.kind is FailureKind.PROTOCOL
    plane.start(a, "good", blocks(1))
    await until(lambda: bool(b.heard))
    assert b.heard == [Coming(0, blocks(1), [])]


IDLE = RankStatus(0, 0, 0, 0.0, 0, 0, 0)


async def test_a_prompt_on_a_rank_that_there_is_not_ends_the_link(plane: Plane) -> None:
    a = await plane.frontend("a")
    (session,) = plane.service._sessions.values()
    told = Status([IDLE], 0, [Coming(1, blocks(1), [])])
    await plane.service._send_now(session.address, told)
    lost = await asyncio.wait_for(a.link.lost(), 60)
    assert isinstance(lost, WorkerGarbledError) and "rank 1" in str(lost)
    assert not a.heard


@pytest.mark.parametrize(
    "coming",
    [
        [Coming(0, [], [])] * (MAX_COMING + 1),
        [Coming(0, blocks(*range(MAX_NEW_BLOCKS + 1)), [])],
        [Coming(-1, [], [])],
        [Coming(0, [BlockHash(b"")], [])],
        [Coming(0, [], [MmHash("cat")] * (MAX_NEW_MEDIA + 1))],
        [Coming(0, [], [MmHash("c" * (MAX_MM_HASH_LEN + 1))])],
    ],
)
def test_more_than_is_told_at_once_is_refused(coming: list[Coming]) -> None:
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    frames = [memoryview(bytearray(part)) for part in codec.encode(Status([IDLE], 0, coming))]
    with pytest.raises(ProtocolError):
        codec.decode(frames)


# What a router makes of it


@pytest.fixture
async def routers() -> AsyncIterator[tuple[Router, Router, Clock]]:
    clock = Clock()
    made = [Router(clock=clock, seed=seed) for seed in (1, 2)]
    for router in made:
        for name in ("w0", "w1", "w2", "w3"):
            await router.roster.add(worker(name))
    yield made[0], made[1], clock
    for router in made:
        await router.close()


async def test_a_prompt_that_another_sent_is_followed(
    routers: tuple[Router, Router, Clock],
) -> None:
    ours, theirs, _ = routers
    for number in range(20):
        prompt = [number * 1000 + position for position in range(640)]
        first = theirs.route(request(prompt))
        new = theirs.in_flight.new_blocks(first.request_id)
        assert len(new) == first.prompt_blocks
        ours.in_flight.others_sent(first.target, new, [])
        second = ours.route(request([*prompt, 1]))
        assert second.target == first.target
        assert second.overlap_blocks == first.prompt_blocks
        for router, decision in ((theirs, first), (ours, second)):
            router.in_flight.finished(decision.request_id)


async def test_what_another_sent_is_forgotten_with_time_and_with_its_worker(
    routers: tuple[Router, Router, Clock],
) -> None:
    ours, _, clock = routers
    target = Target(W0, 0)
    knowledge = ours.roster.state(target).knowledge
    assert knowledge is Knowledge.APPROXIMATE  # so the longer time counts
    ours.in_flight.others_sent(target, blocks(1, 2), [MmHash("cat")])
    assert ours.media.holders(MmHash("cat"), clock()) == {W0}
    assert ours.roster.indexes.predicted.blocks == 2
    clock.now += APPROXIMATE_TTL_S + 1
    assert ours.media.holders(MmHash("cat"), clock()) == set()
    ours.roster.indexes.predicted.expire(clock(), 10)
    assert ours.roster.indexes.predicted.blocks == 0
    await ours.roster.remove(W0)
    ours.in_flight.others_sent(target, blocks(1, 2), [MmHash("cat")])
    assert ours.roster.indexes.predicted.blocks == 0
    assert ours.media.holders(MmHash("cat"), clock()) == set()


async def test_what_never_was_routed_brings_nothing_new(
    routers: tuple[Router, Router, Clock],
) -> None:
    assert routers[0].in_flight.new_blocks(RequestId("nobody")) == ()

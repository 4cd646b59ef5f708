"""Frontends learn from a worker what others have there, over real sockets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from backend_worker.engine.vllm_engine import Items, RankLoad
from backend_worker.plane import load_report
from backend_worker.plane import service as worker_service
from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.errors import ProtocolError, WorkerGarbledError
from common.identity import Incarnation, RequestId, WorkerId
from common.request_plane.protocol import (
    PROTOCOL_VERSION,
    Failed,
    FailureKind,
    Hello,
    Output,
    Status,
    Submit,
    ToFrontend,
    ToWorker,
)
from common.request_plane.step_sums import RankStatus, StepSums
from common.request_plane.wire import Codec
from common.transfer.handshake import TransferOffer
from common.transfer.transports import receivers
from frontend.workers.dispatch import Answer
from frontend.workers.link import WorkerLink
from tests.fakes.cards import make_card
from tests.fakes.engine import ScriptedEngine, no_rendering, output
from tests.waiting import until

RANKS = (2, 3)


class TwoRanks(ScriptedEngine):
    """Answers in two steps that a test allows, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.script = self._steps
        self.first = asyncio.Event()
        self.last = asyncio.Event()
        self.asked: list[Submit] = []

    @property
    def ranks(self) -> tuple[int, ...]:
        return RANKS

    def load(self) -> dict[int, RankLoad]:
        return {3: RankLoad(running=self.running, waiting=1, kv_usage=0.5)}

    async def _steps(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        self.asked.append(submit)
        await self.first.wait()
        yield output("a", finished=False)
        await self.last.wait()
        yield output("b", finished=True)


class Frontend:
    """One frontend, and the last that it heard."""

    def __init__(self, name: str, endpoint: str, context: zmq.asyncio.Context) -> None:
        card = make_card(request_endpoint=endpoint, ranks=list(RANKS))
        self.statuses: list[Status] = []
        self.link = WorkerLink(card, context, Incarnation(name), self.statuses.append)
        self.answers: list[Answer] = []

    def others(self, rank: int) -> tuple[int, int, int]:
        if not self.statuses:
            return (-1, -1, -1)
        (one,) = (one for one in self.statuses[-1].ranks if one.rank == rank)
        return one.others_active, one.others_prefill_tokens, one.others_decode_tokens

    async def run(self, name: str, rank: int | None, prefill: int = 7, prompt: int = 10) -> None:
        submit = Submit(
            RequestId(name), [1] * prompt, SamplingParams(), [], [], rank=rank,
            prefill_tokens=prefill,
        )  # fmt: skip
        async for answer in self.link.dispatch(submit, []):
            self.answers.append(answer)


class Fleet:
    """A worker of two ranks, and frontends as a test wants them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.engine = TwoRanks()
        self.service = WorkerService(
            self.engine,
            MediaReceiver(receivers(no_rendering, None)),
            WorkerId("w0"),
            Incarnation("i0"),
            "tcp://127.0.0.1:0",
        )
        self.context = zmq.asyncio.Context()
        self.tasks: list[asyncio.Task[None]] = [asyncio.create_task(self.service.run())]
        self._stack = stack

    async def frontend(self, name: str) -> Frontend:
        frontend = Frontend(name, self.service.endpoint, self.context)
        await frontend.link.open(TransferOffer().model_dump_json().encode())
        self._stack.push_async_callback(frontend.link.close)
        await until(lambda: bool(frontend.statuses))
        return frontend

    def start(self, frontend: Frontend, *args: Any) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(frontend.run(*args)))
        return self.tasks[-1]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.service.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def open_fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(stack)
        stack.push_async_callback(fleet.close)
        yield fleet


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    # The clock stands still: what is heard is news, not the regular report.
    monkeypatch.setattr(worker_service, "PING_INTERVAL_S", 3600.0)
    async with open_fleet() as fleet:
        yield fleet


async def test_others_hear_of_each_step_without_waiting_for_the_clock(fleet: Fleet) -> None:
    a, b = await fleet.frontend("a"), await fleet.frontend("b")
    assert b.others(2) == b.others(3) == (0, 0, 0)
    running = fleet.start(a, "r", 3)
    await until(lambda: b.others(3) == (1, 7, 0))
    assert b.others(2) == (0, 0, 0)
    fleet.engine.first.set()
    await until(lambda: b.others(3) == (1, 0, 10))
    assert b.statuses[-1].ranks[1].running == 1
    assert (b.statuses[-1].ranks[1].waiting, b.statuses[-1].ranks[1].kv_usage) == (1, 0.5)
    assert (b.statuses[-1].ranks[0].waiting, b.statuses[-1].ranks[0].kv_usage) == (0, 0.0)
    fleet.engine.last.set()
    await running
    await until(lambda: b.others(3) == (0, 0, 0))
    assert all(a.others(rank) == (0, 0, 0) for rank in RANKS)


async def test_a_frontend_alone_hears_nothing_but_ends(fleet: Fleet) -> None:
    a = await fleet.frontend("a")
    before = len(a.statuses)
    fleet.engine.first.set()
    fleet.engine.last.set()
    for name in range(20):
        await a.run(str(name), 2)
    # With its last answer and after it, as without others.
    await until(lambda: fleet.service.active_requests == 0)
    assert len(a.statuses) - before <= 2 * 20


async def test_a_burst_is_told_in_few_words(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_report, "REPORT_PAUSE_S", 0.2)
    a, b = await fleet.frontend("a"), await fleet.frontend("b")
    before = len(b.statuses)
    for name in range(200):
        fleet.start(a, str(name), 2)
    await until(lambda: b.others(2) == (200, 1400, 0))
    told = len(b.statuses) - before
    assert told < 100, "one for many changes"


async def test_requests_of_a_frontend_that_leaves_are_nobody_s(fleet: Fleet) -> None:
    a, b = await fleet.frontend("a"), await fleet.frontend("b")
    for name in range(5):
        fleet.start(a, str(name), 2)
    await until(lambda: b.others(2) == (5, 35, 0))
    await a.link.close()
    await until(lambda: b.others(2) == (0, 0, 0))


async def test_requests_of_a_frontend_that_dies_are_nobody_s(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await fleet.frontend("a"), await fleet.frontend("b")
    fleet.start(a, "r", 2)
    await until(lambda: b.others(2) == (1, 7, 0))
    (session,) = (one for one in fleet.service._sessions.values() if one.frontend_id == "a")
    session.last_heard = float("-inf")  # as after long silence
    await fleet.service._end_session(session)
    await until(lambda: b.others(2) == (0, 0, 0))


async def test_requests_of_a_process_that_ended_are_nobody_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_service, "PING_INTERVAL_S", 0.05)
    async with open_fleet() as fleet:
        b = await fleet.frontend("b")
        killed = fleet.context.socket(zmq.DEALER)
        killed.connect(fleet.service.endpoint)
        await killed.send_multipart(_encoded(_hello()))
        submit = Submit(
            RequestId("r"), [1] * 10, SamplingParams(), [], [], rank=2, prefill_tokens=7
        )
        await killed.send_multipart(_encoded(submit))
        # Not before it has its session: what comes earlier is a stranger's.
        while b.others(2) != (1, 7, 0):
            await asyncio.sleep(0.05)
            await killed.send_multipart(_encoded(submit))
        killed.close(linger=0)  # without a word, as the kernel does it for a killed process
        await until(lambda: b.others(2) == (0, 0, 0))


async def test_an_abort_is_told(fleet: Fleet) -> None:
    a, b = await fleet.frontend("a"), await fleet.frontend("b")
    running = fleet.start(a, "r", 3)
    await until(lambda: b.others(3) == (1, 7, 0))
    running.cancel()
    await until(lambda: b.others(3) == (0, 0, 0))


async def test_a_request_without_a_rank_is_counted_where_it_runs(fleet: Fleet) -> None:
    a, b = await fleet.frontend("a"), await fleet.frontend("b")
    fleet.start(a, "one", 2)
    await until(lambda: b.others(2)[0] == 1)
    fleet.start(a, "two", None)
    await until(lambda: b.others(3) == (1, 7, 0))
    assert [one.rank for one in fleet.engine.asked] == [2, 3]


async def test_a_rank_that_the_worker_has_not_is_refused(fleet: Fleet) -> None:
    a, b = await fleet.frontend("a"), await fleet.frontend("b")
    for rank in (0, 4, -1, 1 << 40):
        a.answers.clear()
        await a.run(f"r{rank}", rank)
        (failed,) = a.answers
        assert isinstance(failed, Failed) and failed.kind is FailureKind.PROTOCOL
        assert f"no rank {rank}" in failed.message
    assert b.others(2) == b.others(3) == (0, 0, 0) and not fleet.engine.asked


async def test_an_estimate_counts_no_more_than_twice_the_prompt(fleet: Fleet) -> None:
    a, b = await fleet.frontend("a"), await fleet.frontend("b")
    fleet.start(a, "r", 2, 1 << 40)
    await until(lambda: b.others(2) == (1, 20, 0))


@pytest.mark.parametrize("estimate", [-1, 1 << 62, 1.5, float("nan"), "many"])
async def test_an_estimate_that_is_none_fails_its_request_alone(
    fleet: Fleet, estimate: object
) -> None:
    a = await fleet.frontend("a")
    await a.run("bad", 2, estimate)  # type: ignore[arg-type]
    (failed,) = a.answers
    assert isinstance(failed, Failed) and failed.kind is FailureKind.PROTOCOL
    a.answers.clear()
    fleet.engine.first.set()
    fleet.engine.last.set()
    await a.run("good", 2)
    assert isinstance(a.answers[-1], Output)


async def test_whoever_reads_nothing_holds_up_nobody_s_news(fleet: Fleet) -> None:
    a, b = await fleet.frontend("a"), await fleet.frontend("b")
    deaf = fleet.context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.connect(fleet.service.endpoint)
    await deaf.send_multipart(_encoded(_hello()))
    await until(lambda: len(fleet.service._sessions) == 3)
    for name in range(300):
        fleet.start(a, str(name), 2)
    await until(lambda: b.others(2) == (300, 2100, 0))
    deaf.close(linger=0)


def _hello() -> Hello:
    offer = TransferOffer().model_dump_json().encode()
    return Hello(PROTOCOL_VERSION, Incarnation("raw"), offer)


def _encoded(message: ToWorker) -> list[bytes]:
    codec: Codec[ToWorker] = Codec(ToWorker)
    return [bytes(frame) for frame in codec.encode(message)]


# What a frontend makes of a report

GOOD = {"rank": 2, "running": 1, "waiting": 1, "kv_usage": 0.5,
        "others_active": 1, "others_prefill_tokens": 1, "others_decode_tokens": 1}  # fmt: skip
ODD: list[tuple[str, object]] = [
    *((field, value) for field in GOOD for value in (-1, 1 << 62, float("nan"), None, "x", True)),
    ("kv_usage", 1.01), ("kv_usage", float("inf")), ("running", 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), ODD)
def test_figures_that_are_none_are_refused(field: str, value: object) -> None:
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    bad = RankStatus(**{**GOOD, field: value})  # type: ignore[arg-type]
    frames = [memoryview(bytearray(frame)) for frame in codec.encode(Status([bad], 0))]
    with pytest.raises(ProtocolError):
        codec.decode(frames)


def status(*ranks: int) -> Status:
    return Status([RankStatus(**{**GOOD, "rank": rank}) for rank in ranks], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [(), (2,), (2, 2), (2, 3, 4), (2, 4), (2, 3, 3), (65535, 0)])
async def test_a_report_of_other_ranks_than_the_card_s_ends_the_link(
    fleet: Fleet, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await fleet.frontend("a")
    heard = len(a.statuses)
    (session,) = fleet.service._sessions.values()
    await fleet.service._send_now(session.address, status(*ranks))
    lost = await asyncio.wait_for(a.link.lost(), 60)
    assert isinstance(lost, WorkerGarbledError) and "ranks" in str(lost)
    assert len(a.statuses) == heard


def test_ranks_may_come_in_any_order() -> None:
    status(3, 2).check(RANKS)
    with pytest.raises(ProtocolError, match=r"of ranks \[2\], the card of \[2, 3\]"):
        status(2).check(RANKS)


def test_a_report_travels_whole() -> None:
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    sent = status(2, 3)
    frames = [memoryview(bytearray(frame)) for frame in codec.encode(sent)]
    assert msgspec.structs.asdict(codec.decode(frames)[0]) == msgspec.structs.asdict(sent)


SUMS = list(msgspec.structs.astuple(StepSums(2).plus(5, 9.5)))


@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf"), 1e19, None, "x", True])
@pytest.mark.parametrize("place", range(len(SUMS)))
def test_sums_of_steps_that_are_none_are_refused(place: int, value: Any) -> None:
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    bad = StepSums(*(value if number == place else one for number, one in enumerate(SUMS)))
    frames = [memoryview(bytearray(each)) for each in codec.encode(Status([], 0, steps=[bad]))]
    with pytest.raises(ProtocolError):
        codec.decode(frames)


def test_steps_of_another_rank_than_the_card_s() -> None:
    told = status(2, 3)
    msgspec.structs.replace(told, steps=[StepSums(3)]).check(RANKS)
    with pytest.raises(ProtocolError, match="rank 4"):
        msgspec.structs.replace(told, steps=[StepSums(4)]).check(RANKS)


async def test_each_frontend_is_told_of_steps_and_not_with_every_report(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.engine.step_sums = [StepSums(2).plus(30, 8.0), StepSums(3)]
    monkeypatch.setattr(load_report, "STEPS_PAUSE_S", 1e9)
    fleet.engine.first.set()
    fleet.engine.last.set()
    for name in ("a", "b"):
        one = await fleet.frontend(name)
        for number in range(3):
            await one.run(f"{name}{number}", 2)
        told = [each for each in one.statuses if each.steps]
        assert [each.steps for each in told] == [fleet.engine.step_sums]

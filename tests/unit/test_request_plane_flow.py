"""What the request plane refuses and holds back: drain and bounds, over real sockets."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace

import pytest
import torch
import zmq
import zmq.asyncio
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from backend_worker.engine.vllm_engine import Items
from common.errors import (
    EngineFailedError,
    SlowClientError,
    WorkerBusyError,
    WorkerDiedError,
    WorkerStalledError,
)
from common.identity import Incarnation, RequestId, WorkerId
from common.request_plane.protocol import (
    Ack,
    Failed,
    FailureKind,
    Output,
    Outputs,
    Ping,
    Submit,
    ToFrontend,
    ToWorker,
)
from frontend.workers import link as worker_link
from frontend.workers.dispatch import Backlog
from frontend.workers.link import WorkerLink
from tests.fakes.cards import make_card
from tests.fakes.engine import never, output, pooled
from tests.fakes.plane import Plane, collect, media, open_plane
from tests.waiting import until

MAX_REQUESTS = 60


@pytest.fixture
async def plane(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plane]:
    monkeypatch.setattr("backend_worker.plane.service.SEND_QUEUE", 4)
    monkeypatch.setattr("frontend.workers.link.RECEIVE_QUEUE", 4)
    async with open_plane("shm", max_requests=MAX_REQUESTS) as plane:
        yield plane


class Gate:
    """A script that answers, and finishes when a test says so."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()

    async def __call__(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("first", finished=False)
        await self.finish.wait()
        yield output("last", finished=True)


async def test_a_draining_worker_finishes_what_it_has_and_refuses_the_rest(plane: Plane) -> None:
    gate = plane.engine.script = Gate()
    running = asyncio.create_task(collect(plane.dispatch(name="running")))
    await until(lambda: plane.engine.running == 1)
    draining = asyncio.create_task(plane.service.drain())
    await asyncio.sleep(0)

    cat = media("cat", 7)
    answers = await collect(plane.dispatch(cat, handles=await plane.send(cat), name="late"))
    assert [type(answer) for answer in answers] == [Ack, Failed]
    failed = answers[-1]
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.BUSY and "draining" in failed.message
    assert plane.leases() == 0
    assert not draining.done()

    gate.finish.set()
    await asyncio.wait_for(draining, 60)
    last = (await running)[-1]
    assert isinstance(last, Output) and last.finished
    assert plane.service.active_requests == 0


async def test_the_end_of_the_last_request_arrives_although_the_worker_leaves(plane: Plane) -> None:
    gate = plane.engine.script = Gate()
    running = [
        asyncio.create_task(collect(plane.dispatch(name=f"running-{number}")))
        for number in range(50)
    ]
    await until(lambda: plane.engine.running == len(running))
    gate.finish.set()
    await plane.service.drain()
    plane.serving.cancel()
    await plane.service.close()
    for answers in await asyncio.gather(*running):
        last = answers[-1]
        assert isinstance(last, Output) and last.finished


async def test_a_full_worker_refuses_and_goes_on(plane: Plane) -> None:
    gate = plane.engine.script = Gate()
    running = [
        asyncio.create_task(collect(plane.dispatch(name=f"running-{number}")))
        for number in range(MAX_REQUESTS)
    ]
    await until(lambda: plane.engine.running == MAX_REQUESTS)
    failed = (await collect(plane.dispatch(name="one-too-many")))[-1]
    assert isinstance(failed, Failed) and failed.kind is FailureKind.BUSY
    assert f"{MAX_REQUESTS} requests already" in failed.message
    gate.finish.set()
    await asyncio.gather(*running)
    last = (await collect(plane.dispatch(name="later")))[-1]
    assert isinstance(last, Output) and last.finished


async def test_a_frontend_that_reads_slowly_holds_up_only_its_own_requests(plane: Plane) -> None:
    made = 0

    async def large(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        nonlocal made
        for _ in range(99):
            made += 1
            yield output("x" * (1 << 20), finished=False)
        yield output("last", finished=True)

    plane.engine.script = large
    reading, *_ = plane.link._tasks
    reading.cancel()  # as if its process were stuck
    slow = asyncio.create_task(collect(plane.dispatch(name="slow")))
    await until(lambda: made > 0)

    other = WorkerLink(plane.link.card, plane.context, Incarnation("other"), lambda status: None)
    await other.open(plane.media_sender.offer())
    quick = other.dispatch(Submit(RequestId("quick"), [1], SamplingParams(), [], []), [])
    assert len(await collect(quick)) == 101
    assert made < 99 + 99, "the slow one waits"
    await other.close()

    again = asyncio.create_task(plane.link._read())
    assert len(await slow) == 101
    again.cancel()


async def test_the_outputs_of_one_step_travel_in_one_message(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, end, sizes = asyncio.Event(), asyncio.Event(), list[int]()

    async def stepping(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("first", finished=False)
        await step.wait()
        yield output("second", finished=False)
        await end.wait()
        yield output("last", finished=True)

    send_now = plane.service._send_now

    async def counted(address: bytes, message: ToFrontend) -> bool:
        if isinstance(message, Outputs) and any(
            one.outputs[0].text == "second" for one in message.outputs
        ):
            sizes.append(len(message.outputs))
        return await send_now(address, message)

    monkeypatch.setattr(plane.service, "_send_now", counted)
    plane.engine.script = stepping
    answers = [plane.dispatch(name=f"r{number}") for number in range(MAX_REQUESTS)]
    for each in answers:
        assert isinstance(await anext(each), Ack)
        assert isinstance(await anext(each), Output)
    step.set()
    await until(lambda: sum(sizes) == MAX_REQUESTS)
    end.set()
    for each in answers:
        said = [one.outputs[0].text for one in await collect(each) if isinstance(one, Output)]
        assert said == ["second", "last"]
    assert sizes == [MAX_REQUESTS]


@pytest.mark.parametrize("most", [1, 2, 128])
async def test_an_output_that_cannot_be_sent_ends_its_request_and_no_other(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("backend_worker.plane.outbox.MAX_OUTPUTS", most)
    step = asyncio.Event()

    async def half_a_letter(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("first", finished=False)
        await step.wait()
        yield output("\ud83d" if submit.request_id == "bad" else "fine", finished=False)
        if submit.request_id == "bad":
            await asyncio.Event().wait()
        yield output("last", finished=True)

    plane.engine.script = half_a_letter
    running = {
        name: asyncio.create_task(collect(plane.dispatch(name=name)))
        for name in ("one", "bad", "two", "three")
    }
    await until(lambda: plane.engine.running == len(running))
    step.set()
    for name, answers in running.items():
        last = (await answers)[-1]
        if name == "bad":
            assert isinstance(last, Failed) and last.kind is FailureKind.PROTOCOL
            assert "can't be sent" in last.message
        else:
            assert isinstance(last, Output) and last.finished
    assert plane.engine.aborted == 1
    await until(lambda: plane.service.active_requests == 0)


async def test_an_answer_with_a_hole_does_not_end_well(plane: Plane) -> None:
    async def half_a_letter(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("first", finished=False)
        yield output("\ud83d", finished=False)
        yield output("last", finished=True)

    plane.engine.script = half_a_letter
    answers = await collect(plane.dispatch())
    assert [type(one) for one in answers] == [Ack, Output, Failed]
    last = answers[-1]
    assert isinstance(last, Failed) and last.kind is FailureKind.PROTOCOL
    await until(lambda: plane.service.active_requests == 0)


async def test_outputs_that_could_not_leave_leave_later(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake of ours costs no request a token."""
    send_now, failed = plane.service._send_now, list[ToFrontend]()

    async def broken(address: bytes, message: ToFrontend) -> bool:
        if isinstance(message, Outputs) and not failed:
            failed.append(message)
            raise LookupError("ours")
        return await send_now(address, message)

    gate = plane.engine.script = Gate()
    monkeypatch.setattr(plane.service, "_send_now", broken)
    answers = plane.dispatch()
    assert isinstance(await anext(answers), Ack)
    async with asyncio.timeout(60):
        assert isinstance(await anext(answers), Output)
    gate.finish.set()
    assert len(await collect(answers)) == 1 and failed


async def test_a_client_that_does_not_read_is_given_up(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.workers.link.UNREAD_ANSWERS", 4)

    async def endless(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        while True:
            yield output("more", finished=False)
            await asyncio.sleep(0.001)

    plane.engine.script = endless
    computed: list[bool] = []
    answers = plane.dispatch(computed=lambda: computed.append(True))
    assert isinstance(await anext(answers), Ack) and not computed
    await until(lambda: plane.link.active_requests == 0)
    assert plane.engine.aborted == 1 and computed == [True]
    with pytest.raises(SlowClientError):
        await collect(answers)


async def test_an_answer_is_computed_before_its_client_has_read_it(plane: Plane) -> None:
    computed: list[bool] = []
    answers = plane.dispatch(computed=lambda: computed.append(True))
    assert isinstance(await anext(answers), Ack)
    await until(lambda: computed == [True])
    assert len(await collect(answers)) == 2 and computed == [True]


async def test_an_answer_that_failed_is_not_computed(plane: Plane) -> None:
    async def failing(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("more", finished=False)
        raise EngineFailedError("as told")

    plane.engine.script = failing
    computed: list[bool] = []
    answers = await collect(plane.dispatch(computed=lambda: computed.append(True)))
    assert isinstance(answers[-1], Failed) and not computed


async def test_a_worker_that_answers_nothing_has_stalled(plane: Plane) -> None:
    plane.engine.script = never
    card = make_card(request_endpoint=plane.service.endpoint)
    link = WorkerLink(card, plane.context, Incarnation("f2"), lambda status: None, stall_s=0.5)
    await link.open(plane.media_sender.offer())
    try:
        with pytest.raises(WorkerStalledError, match=r"no answer .* for 0\.5 s"):
            await collect(link.dispatch(Submit(RequestId("r"), [1], SamplingParams(), [], []), []))
    finally:
        await link.close()
    await until(lambda: plane.engine.running == 0)


async def test_who_stood_still_does_not_take_that_for_the_silence_of_a_worker(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    monkeypatch.setattr(worker_link, "time", clock)
    monkeypatch.setattr(worker_link, "PING_INTERVAL_S", 0.02)
    card = make_card(request_endpoint=plane.service.endpoint)
    link = WorkerLink(card, plane.context, Incarnation("f2"), lambda status: None)
    await link.open(plane.media_sender.offer())

    async def unsent(address: bytes, message: ToFrontend) -> bool:
        return True

    pings = 0
    send = link._send

    async def counted(message: ToWorker) -> None:
        nonlocal pings
        pings += isinstance(message, Ping)
        await send(message)

    monkeypatch.setattr(plane.service, "_send_now", unsent)  # what it says is not read yet
    monkeypatch.setattr(link, "_send", counted)

    def ticked() -> bool:
        return pings > 2 or link._lost.done()

    try:
        await until(ticked)
        later_s, pings = 20.0, 0
        await until(ticked)
        assert not link._lost.done()
        while not link._lost.done():  # now it is the worker
            later_s, pings = later_s + 1.0, 0
            await until(ticked)
        assert isinstance(await link.lost(), WorkerDiedError)
    finally:
        await link.close()


async def test_too_many_bytes_on_the_way_are_refused_and_nothing_stays(plane: Plane) -> None:
    plane.link._backlog = Backlog(max_bytes=0)
    cat = media("cat", 7)
    handles = await plane.media_sender.send(WorkerId("w0"), [cat], inline=True)
    with pytest.raises(WorkerBusyError, match="slow to read"):
        await collect(plane.dispatch(cat, handles=handles))
    assert plane.link.active_requests == 0
    assert len(await collect(plane.dispatch(name="small"))) == 3


async def test_a_backlog_counts_until_its_bytes_have_left() -> None:
    context = zmq.asyncio.Context()
    reader, writer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    writer.connect(f"tcp://127.0.0.1:{reader.bind_to_random_port('tcp://127.0.0.1')}")
    backlog = Backlog(max_bytes=1)
    assert not backlog.full
    await writer.send_multipart(backlog.track([b"head", bytes(64 << 20), b"tail"]), copy=False)
    assert backlog.full
    assert len(await reader.recv_multipart()) == 3
    await until(lambda: not backlog.full)
    await writer.send_multipart(backlog.track([b"small"]), copy=False)
    assert not backlog.full
    context.destroy(linger=0)


async def test_a_large_message_on_a_slow_line_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("backend_worker.plane.service", "frontend.workers.link"):
        monkeypatch.setattr(f"{module}.PING_INTERVAL_S", 0.05)
    monkeypatch.setattr("backend_worker.plane.service.SESSION_TIMEOUT_S", 0.5)
    async with open_plane("inline") as plane:
        await plane.link.close()
        line = Line(plane.service.endpoint, 4 << 20)
        card = make_card(request_endpoint=await line.open())
        plane.link = WorkerLink(card, plane.context, Incarnation("f2"), plane.statuses.append)
        await plane.open()
        item = media("large", 1, 4096)
        answers = asyncio.create_task(collect(plane.dispatch(item, handles=await plane.send(item))))
        await line.stuck.wait()
        del plane.statuses[:]
        await until(lambda: len(plane.statuses) > 20 or answers.done())
        line.go_on.set()
        assert isinstance((await answers)[-1], Output)
        await line.close()


async def test_a_large_answer_on_a_slow_line_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("backend_worker.plane.service", "frontend.workers.link"):
        monkeypatch.setattr(f"{module}.PING_INTERVAL_S", 0.05)
    monkeypatch.setattr("frontend.workers.link.SESSION_TIMEOUT_S", 0.5)
    async with open_plane("inline") as plane:

        async def large(submit: Submit, items: Items) -> AsyncGenerator[PoolingRequestOutput]:
            answer = pooled(1.0)
            answer.outputs.data = torch.zeros(4 << 20)
            yield answer

        plane.engine.script = large
        await plane.link.close()
        line = Line(plane.service.endpoint, 4 << 20, answers=True)
        card = make_card(request_endpoint=await line.open())
        plane.link = WorkerLink(card, plane.context, Incarnation("f2"), plane.statuses.append, 0.5)
        await plane.open()
        submit = Submit(RequestId("r"), [1], None, [], [], pooling_params=PoolingParams())
        answers = asyncio.create_task(collect(plane.link.dispatch(submit, [])))
        await line.stuck.wait()
        before = line.others
        await until(lambda: line.others > before + 20 or answers.done())
        line.go_on.set()
        last = (await answers)[-1]
        assert isinstance(last, Output) and last.pooled is not None
        assert last.pooled.nbytes == 16 << 20
        await line.close()


class Line:
    """A line to a worker that stands still after so many bytes, of answers or requests, until it
    may go on. ``others`` counts what passes the other way."""

    def __init__(self, endpoint: str, after: int, *, answers: bool = False) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._left = after
        self._answers = answers
        self.others = 0
        self.stuck = asyncio.Event()
        self.go_on = asyncio.Event()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(
            self._pass_on(reader, there[1], not self._answers),
            self._pass_on(there[0], writer, self._answers),
        )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool
    ) -> None:
        while data := await reader.read(1 << 16):
            self.others += not slow
            self._left -= len(data) if slow else 0
            if slow and self._left < 0:
                self.stuck.set()
                await self.go_on.wait()
            writer.write(data)
            await writer.drain()
        writer.close()

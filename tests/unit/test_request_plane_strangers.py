"""Sessions that are careless, hostile or slow: nobody else notices, and nobody waits in vain."""

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from backend_worker.engine.vllm_engine import Items
from backend_worker.plane import service as service_module
from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.errors import (
    DuplicateRequestError,
    ProtocolError,
    UnsendableRequestError,
    WorkerDiedError,
    WorkerGarbledError,
    WorkerLeftError,
    WorkerLostError,
)
from common.identity import Incarnation, MmHash, RequestId, WorkerId
from common.request_plane import loop_socket
from common.request_plane.protocol import (
    MAX_MEDIA,
    MAX_OUTPUTS,
    PROTOCOL_VERSION,
    Abort,
    Ack,
    Failed,
    FailureKind,
    Goodbye,
    Hello,
    Leave,
    Nack,
    Offer,
    Output,
    Outputs,
    Ping,
    Status,
    Submit,
    Supply,
    ToFrontend,
    ToWorker,
    Welcome,
)
from common.request_plane.step_sums import RankStatus
from common.request_plane.wire import Codec
from common.transfer.handshake import TransferOffer, TransferReply
from common.transfer.shm import ShmReceiver
from frontend.workers import link
from frontend.workers.link import WorkerLink
from tests.fakes.cards import make_card
from tests.fakes.engine import ScriptedEngine, never, output
from tests.fakes.plane import Plane, collect, media, open_plane
from tests.waiting import until

OFFER = TransferOffer().model_dump_json().encode()


def damaged(message: msgspec.Struct, **fields: object) -> list[bytes]:
    """A message of which some field has a value that can't be."""
    head = msgspec.to_builtins(message) | fields
    return [(1).to_bytes(4, "little"), msgspec.msgpack.encode(head)]


def submit(name: str) -> Submit:
    return Submit(RequestId(name), [1, 2], SamplingParams(), [], [])


@pytest.fixture(params=["shm", "nixl"])
async def plane(request: pytest.FixtureRequest) -> AsyncIterator[Plane]:
    async with open_plane(request.param) as plane:
        yield plane


only_shm = pytest.mark.parametrize("plane", ["shm"], indirect=True)


async def another_link(plane: Plane) -> WorkerLink:
    link = WorkerLink(plane.link.card, plane.context, Incarnation("f"), lambda status: None)
    await link.open(plane.media_sender.offer())
    return link


class Raw:
    """A frontend that says what a test wants."""

    def __init__(self, plane: Plane) -> None:
        self._codec: Codec[ToFrontend] = Codec(ToFrontend)
        self._unheard: list[msgspec.Struct] = []
        self._socket = plane.context.socket(zmq.DEALER)
        self._socket.connect(plane.service.endpoint)

    async def say(self, message: ToWorker) -> None:
        await self._socket.send_multipart(self._codec.encode(message))

    async def say_frames(self, frames: list[bytes]) -> None:
        await self._socket.send_multipart(frames)

    async def hear(self, *kinds: type[msgspec.Struct]) -> Any:
        """The next message, or output, of one of some kinds."""
        async with asyncio.timeout(60):
            while True:
                while self._unheard:
                    if isinstance(message := self._unheard.pop(0), kinds):
                        return message
                frames = [memoryview(frame) for frame in await self._socket.recv_multipart()]
                said = self._codec.decode(frames)[0]
                self._unheard += said.outputs if isinstance(said, Outputs) else [said]

    async def hello(self) -> None:
        await self.say(Hello(PROTOCOL_VERSION, Incarnation("raw"), OFFER))
        await self.hear(Welcome)

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
async def raw(plane: Plane) -> AsyncIterator[Raw]:
    raw = Raw(plane)
    await raw.hello()
    yield raw
    raw.close()


class Held:
    """A script whose engine lets go of a request only when a test says so."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    async def __call__(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("first", finished=False)
        try:
            await asyncio.Event().wait()
        finally:
            await self.let_go.wait()


# Ids


@only_shm
async def test_a_link_sends_no_second_request_of_one_id(plane: Plane) -> None:
    plane.engine.script = never
    first = plane.dispatch(name="r")
    waiting = asyncio.ensure_future(anext(first))
    await until(lambda: plane.engine.running == 1)
    cat = media("cat", 7)
    with pytest.raises(DuplicateRequestError):
        await collect(plane.dispatch(cat, handles=await plane.send(cat), name="r"))
    assert plane.leases() == 0 and plane.link.active_requests == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await first.aclose()
    await until(lambda: plane.link.active_requests == 0)


@only_shm
async def test_a_worker_fails_a_second_request_of_one_id_and_goes_on(
    plane: Plane, raw: Raw
) -> None:
    go_on = asyncio.Event()

    async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        await go_on.wait()
        yield output("the first one's", finished=True)

    plane.engine.script = script
    await raw.say(submit("r"))
    await raw.say(submit("r"))
    failed = await raw.hear(Failed, Output, Ack)
    assert isinstance(failed, Failed) and failed.kind is FailureKind.PROTOCOL
    assert len(plane.engine.seen) == 1
    go_on.set()
    last = await raw.hear(Failed, Output)
    assert isinstance(last, Output) and last.outputs[0].text == "the first one's"


@only_shm
async def test_two_frontends_may_use_one_id(plane: Plane, raw: Raw) -> None:
    plane.engine.script = never
    await raw.say(submit("r"))
    await until(lambda: plane.engine.running == 1)
    waiting = asyncio.ensure_future(collect(plane.dispatch(name="r")))
    await until(lambda: plane.engine.running == 2)
    await raw.say(Abort(RequestId("r")))
    assert (await raw.hear(Failed)).kind is FailureKind.ABORTED
    assert plane.engine.running == 1 and not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@only_shm
async def test_a_request_aborted_before_it_began_says_that_it_ended(plane: Plane, raw: Raw) -> None:
    """Both messages are read in one turn, as when a client leaves at once."""
    (session,) = [one for one in plane.service._sessions.values() if one.frontend_id == "raw"]
    for message in (submit("r"), Abort(RequestId("r"))):
        await plane.service._handle(session.address, session, message, [])
    assert (await raw.hear(Ack, Failed)) == Ack(RequestId("r"), [])
    assert (await raw.hear(Ack, Failed)).kind is FailureKind.ABORTED
    await until(lambda: plane.service.active_requests == 0)


# What can't be read


@only_shm
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_token_ids": "none"}, "prompt_token_ids"),
        # vLLM's own check, which a worker's environment may make stricter than a frontend's.
        ({"sampling_params": {"n": 1 << 20}}, "VLLM_MAX_N_SEQUENCES"),
    ],
)
async def test_a_request_that_cannot_be_read_fails_and_its_session_goes_on(
    plane: Plane, raw: Raw, fields: dict[str, object], named: str
) -> None:
    await raw.say_frames(damaged(submit("bad"), **fields))
    failed = await raw.hear(Failed, Goodbye)
    assert isinstance(failed, Failed) and failed.request_id == "bad"
    assert failed.kind is FailureKind.PROTOCOL and named in failed.message
    await raw.say(submit("good"))
    while not (last := await raw.hear(Output)).finished:
        pass
    assert last.request_id == "good"


@only_shm
@pytest.mark.parametrize("junk", [[b"junk"], damaged(Ping(), type="who knows"), [b"\1\0\0\0", b""]])
async def test_anything_else_that_cannot_be_read_ends_its_session_only(
    plane: Plane, raw: Raw, junk: list[bytes]
) -> None:
    plane.engine.script = never
    await raw.say(submit("r"))
    await until(lambda: plane.engine.running == 1)
    await raw.say_frames(junk)
    assert "can't be read" in (await raw.hear(Goodbye)).reason
    await until(lambda: plane.engine.running == 0)
    await raw.say(Ping())
    assert "no session for this frontend" in (await raw.hear(Goodbye)).reason
    await raw.hello()  # and may come back
    plane.engine.script = ScriptedEngine().script
    assert len(await collect(plane.dispatch())) == 3


@only_shm
async def test_what_a_stranger_says_is_not_answered(plane: Plane) -> None:
    stranger = Raw(plane)
    await stranger.say_frames(damaged(submit("r"), prompt_token_ids="none"))
    await stranger.say_frames([b"junk"])
    await stranger.hello()
    assert len(await collect(plane.dispatch())) == 3
    stranger.close()


@only_shm
async def test_a_mistake_of_ours_in_one_session_ends_that_one_only(
    plane: Plane, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = WorkerService._handle

    async def handle_or_fail(self: WorkerService, address: bytes, *rest: Any) -> None:
        if isinstance(rest[1], Abort):
            raise LookupError("ours")
        await handle(self, address, *rest)

    monkeypatch.setattr(WorkerService, "_handle", handle_or_fail)
    await raw.say(Abort(RequestId("r")))
    assert "mistake" in (await raw.hear(Goodbye)).reason
    assert len(await collect(plane.dispatch())) == 3


@only_shm
async def test_a_hello_that_fails_on_our_side_is_answered(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def attach(*_: object) -> None:
        raise LookupError("ours")

    monkeypatch.setattr(MediaReceiver, "attach", attach)
    with pytest.raises(ProtocolError, match="internal error"):
        await another_link(plane)


@only_shm
async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(plane: Plane) -> None:
    cat = media("cat", 7)
    request = msgspec.structs.replace(submit("r"), prompt_text="half a letter \ud83d")
    with pytest.raises(UnsendableRequestError, match=r"can't be given to a worker: .* surrogates"):
        await collect(plane.link.dispatch(request, await plane.send(cat)))
    assert plane.leases() == 0 and plane.link.active_requests == 0


@only_shm
async def test_an_answer_that_cannot_be_sent_fails_its_request(plane: Plane) -> None:
    async def half(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("\ud83d", finished=True)

    plane.engine.script = half
    failed = (await collect(plane.dispatch()))[-1]
    assert isinstance(failed, Failed) and failed.kind is FailureKind.PROTOCOL


@only_shm
async def test_an_error_whose_words_cannot_be_sent_is_told_all_the_same(plane: Plane) -> None:
    async def half(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        raise ValueError("it says \ud83d")
        yield

    plane.engine.script = half
    failed = (await collect(plane.dispatch()))[-1]
    assert isinstance(failed, Failed) and "it says" in failed.message


@only_shm
async def test_an_engine_that_fails_at_the_very_end_of_a_request_does_not_hide_the_end(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def settled(*_: object) -> None:
        raise LookupError("not ours")

    monkeypatch.setattr(ScriptedEngine, "settled", settled)
    plane.engine.script = never
    cat = media("cat", 7)
    answers = plane.dispatch(cat, handles=await plane.send(cat))
    waiting = asyncio.ensure_future(anext(answers))
    await until(lambda: plane.engine.running == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await answers.aclose()
    await until(lambda: plane.link.active_requests == plane.service.active_requests == 0)
    assert plane.leases() == 0


class FakeWorker:
    """The worker's end of a link, that says what a test wants."""

    def __init__(self) -> None:
        self._codec: Codec[ToWorker] = Codec(ToWorker)
        self.context = zmq.asyncio.Context()
        self._socket = self.context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        card = make_card(request_endpoint=f"tcp://127.0.0.1:{port}")
        self.statuses: list[object] = []
        self.link = WorkerLink(card, self.context, Incarnation("f"), self.statuses.append)
        self._address = b""

    async def open(self) -> None:
        opening = asyncio.create_task(self.link.open(OFFER))
        await self.hear(Hello)
        reply = TransferReply().model_dump_json().encode()
        await self.say(Welcome(PROTOCOL_VERSION, WorkerId("w0"), Incarnation("i0"), reply))
        await opening

    async def say(self, message: ToFrontend) -> None:
        await self._socket.send_multipart([self._address, *self._codec.encode(message)])

    async def say_frames(self, frames: list[bytes]) -> None:
        await self._socket.send_multipart([self._address, *frames])

    async def hear(self, kind: type[msgspec.Struct]) -> Any:
        async with asyncio.timeout(60):
            while True:
                self._address, *frames = await self._socket.recv_multipart()
                message = self._codec.decode([memoryview(frame) for frame in frames])[0]
                if isinstance(message, kind):
                    return message

    async def close(self) -> None:
        await self.link.close()
        self._socket.close(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture
async def fake() -> AsyncIterator[FakeWorker]:
    fake = FakeWorker()
    await fake.open()
    yield fake
    await fake.close()


def an_output(name: str, *, finished: bool) -> Output:
    return Output(RequestId(name), output("x", finished=finished).outputs, finished)


def outputs_with(*outputs: object) -> list[bytes]:
    """A message of outputs, of which some are none."""
    head = {"type": "outputs", "outputs": [msgspec.to_builtins(each) for each in outputs]}
    return [(1).to_bytes(4, "little"), msgspec.msgpack.encode(head)]


async def test_an_answer_that_cannot_be_read_ends_its_request_and_no_other(
    fake: FakeWorker,
) -> None:
    bad, good = fake.link.dispatch(submit("bad"), []), fake.link.dispatch(submit("good"), [])
    asking = [asyncio.create_task(collect(answers)) for answers in (bad, good)]
    await fake.hear(Submit)
    await fake.hear(Submit)
    await fake.say_frames(
        outputs_with(
            an_output("good", finished=False), ["bad", 7, False], an_output("good", finished=False)
        )
    )
    with pytest.raises(WorkerGarbledError, match="can't be read"):
        await asking[0]
    assert (await fake.hear(Abort)).request_id == "bad"
    assert fake.link.active_requests == 2, "until the worker says that it ended"
    await fake.say(Failed(RequestId("bad"), FailureKind.ABORTED, "aborted"))
    await fake.say(Outputs([an_output("good", finished=True)]))
    assert len(await asking[1]) == 3
    assert fake.link.active_requests == 0


def logprob(value: float) -> list[dict[int, Logprob]]:
    return [{1: Logprob(-0.5, 1, "a"), 2: Logprob(value, 2, "b")}]


FLAWS: dict[str, Callable[[Output], Output]] = {
    "negative count": lambda good: msgspec.structs.replace(good, num_cached_tokens=-1),
    "no number": lambda good: with_choice(good, logprobs=logprob(math.nan)),
    "too large a number": lambda good: with_choice(good, logprobs=logprob(math.inf)),
    "of a negative token": lambda good: with_choice(good, logprobs=[{-1: Logprob(-0.5)}]),
    "of a token of no vocabulary": lambda good: with_choice(
        good, logprobs=dataclasses.replace(flat([0], [3]), token_ids=[1, 2, 1 << 40])
    ),
    "of a token of the prompt": lambda good: msgspec.structs.replace(
        good, prompt_logprobs=[None, {-1: Logprob(-0.5)}]
    ),
    "of the prompt": lambda good: msgspec.structs.replace(
        good, prompt_logprobs=[None, *logprob(math.nan)]
    ),
    "negative token": lambda good: with_choice(good, token_ids=[-1]),
    "negative index": lambda good: with_choice(good, index=-1),
    "a token of no vocabulary": lambda good: with_choice(good, token_ids=[1 << 62]),
    "an endless reason": lambda good: with_choice(good, finish_reason="stop" * 100),
    "each position with all": lambda good: with_choice(good, logprobs=flat([0] * 3, [3] * 3)),
    "positions apart": lambda good: with_choice(good, logprobs=flat([0, 2], [1, 3])),
    "positions beyond": lambda good: with_choice(good, logprobs=flat([0], [10**9])),
    "lists of several lengths": lambda good: with_choice(
        good, logprobs=dataclasses.replace(flat([0], [3]), ranks=[])
    ),
    "no JSON": lambda good: msgspec.structs.replace(good, kv_transfer_params={"a": math.nan}),
    "many dimensions": lambda good: pooled(good, torch.zeros(1).view([1] * 200_000)),
    "rows of nothing": lambda good: pooled(good, torch.zeros(10**9, 0)),
    "odd numbers": lambda good: pooled(good, torch.zeros(1, dtype=torch.complex64)),
}


def flat(starts: list[int], ends: list[int]) -> FlatLogprobs:
    return FlatLogprobs(starts, ends, [1, 2, 3], [-1.0] * 3, [1, 2, 3], ["a", "b", "c"])


def pooled(good: Output, tensor: torch.Tensor) -> Output:
    return msgspec.structs.replace(good, pooled=tensor)


def with_choice(good: Output, **fields: Any) -> Output:
    return msgspec.structs.replace(good, outputs=[dataclasses.replace(good.outputs[0], **fields)])


@pytest.mark.parametrize("flaw", FLAWS)
async def test_what_no_engine_says_is_its_workers_fault(fake: FakeWorker, flaw: str) -> None:
    bad, good = fake.link.dispatch(submit("bad"), []), fake.link.dispatch(submit("good"), [])
    asking = [asyncio.create_task(collect(answers)) for answers in (bad, good)]
    await fake.hear(Submit)
    await fake.hear(Submit)
    odd = FLAWS[flaw](an_output("bad", finished=True))
    fine = with_choice(an_output("good", finished=True), logprobs=logprob(-math.inf))
    await fake.say(Outputs([odd, fine]))
    with pytest.raises(WorkerGarbledError, match="worker w0: "):
        await asking[0]
    assert len(await asking[1]) == 1
    assert fake.link.active_requests == 0


async def test_log_probabilities_that_lie_flat_are_taken(fake: FakeWorker) -> None:
    asking = asyncio.create_task(collect(fake.link.dispatch(submit("r"), [])))
    await fake.hear(Submit)
    fine = with_choice(an_output("r", finished=True), logprobs=flat([0, 2], [2, 3]))
    await fake.say(Outputs([fine]))
    assert len(await asking) == 1


@pytest.mark.parametrize("module", [link, loop_socket])
async def test_a_message_that_is_too_large_ends_the_link(
    monkeypatch: pytest.MonkeyPatch, fake: FakeWorker, module: Any
) -> None:
    monkeypatch.setattr(link, "MAX_MESSAGE_BYTES", 1 << 10)
    monkeypatch.setattr(loop_socket, "MAX_FRAMES", 64)
    asking = asyncio.create_task(collect(fake.link.dispatch(submit("r"), [])))
    await fake.hear(Submit)
    frames = [b"x" * 2000] if module is link else [b"x"] * 3000
    await fake.say_frames([(1).to_bytes(4, "little"), *frames])
    with pytest.raises(WorkerGarbledError, match="2000 bytes" if module is link else "64 frames"):
        await asking


@only_shm
async def test_a_worker_drops_a_message_of_too_many_frames(
    monkeypatch: pytest.MonkeyPatch, plane: Plane, raw: Raw
) -> None:
    monkeypatch.setattr(loop_socket, "MAX_FRAMES", 64)
    await raw.say_frames([b"x"] * 3000)
    plane.engine.script = never
    await raw.say(submit("r"))
    await until(lambda: plane.engine.running == 1)


async def test_a_frame_that_is_too_large_ends_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_socket, "FRAME_LIMIT", 1 << 16)
    fake = FakeWorker()
    await fake.open()
    try:
        await fake.say(Goodbye("x" * (1 << 17)))
        assert isinstance(await fake.link.lost(), WorkerDiedError), "and not with the goodbye"
    finally:
        await fake.close()


@pytest.mark.parametrize(
    "last",
    [
        outputs_with(["r", 7, True]),
        damaged(Failed(RequestId("r"), FailureKind.BUSY, ""), kind="unheard of"),
    ],
)
async def test_a_last_answer_that_cannot_be_read_is_the_last(
    fake: FakeWorker, last: list[bytes]
) -> None:
    asking = asyncio.create_task(collect(fake.link.dispatch(submit("r"), [])))
    await fake.hear(Submit)
    await fake.say_frames(last)
    with pytest.raises(WorkerGarbledError):
        await asking
    assert fake.link.active_requests == 0


@pytest.mark.parametrize(
    "junk",
    [
        [b"junk"],
        damaged(Ping()),
        damaged(Ack(RequestId("x"), []), held=7),
        damaged(Outputs([]), outputs=7),
        outputs_with(["x", 7, False]),
        outputs_with([7, 7, False]),
        outputs_with(*[["r", [], False]] * (MAX_OUTPUTS + 1)),
    ],
)
async def test_anything_else_that_cannot_be_read_ends_the_link(
    fake: FakeWorker, junk: list[bytes]
) -> None:
    asking = asyncio.create_task(collect(fake.link.dispatch(submit("r"), [])))
    await fake.hear(Submit)
    await fake.say_frames(junk)
    with pytest.raises(WorkerGarbledError):
        await asking
    assert isinstance(await fake.link.lost(), WorkerGarbledError)


async def test_a_link_that_makes_a_mistake_is_lost_and_does_not_hang(fake: FakeWorker) -> None:
    def fail(status: object) -> None:
        raise LookupError("ours")

    fake.link._on_status = fail
    asking = asyncio.create_task(collect(fake.link.dispatch(submit("r"), [])))
    await fake.hear(Submit)
    await fake.say(Status([RankStatus(0, 0, 0, 0.0, 0, 0, 0)], 0))
    with pytest.raises(WorkerLeftError, match="ours"):
        await asking


# Who leaves


@only_shm
@pytest.mark.parametrize("how", ["leaves", "falls silent", "talks nonsense"])
async def test_who_leaves_a_slow_engine_holds_up_nobody(plane: Plane, raw: Raw, how: str) -> None:
    held = plane.engine.script = Held()
    await raw.say(submit("held"))
    await raw.hear(Output)
    (session,) = [one for one in plane.service._sessions.values() if one.frontend_id == "raw"]
    if how == "leaves":
        await raw.say(Leave())
    elif how == "talks nonsense":
        await raw.say_frames([b"junk"])
    else:
        session.last_heard = float("-inf")
    await until(lambda: session.address not in plane.service._sessions)
    plane.engine.script = ScriptedEngine().script
    before = len(plane.statuses)
    assert len(await collect(plane.dispatch())) == 3
    await until(lambda: len(plane.statuses) > before + 3)  # the clock goes on too
    assert plane.service.active_requests == 1, "what the engine still has counts"
    held.let_go.set()
    await until(lambda: plane.service.active_requests == 0)
    assert plane.engine.aborted == 1


@only_shm
async def test_a_worker_closes_although_its_engine_lets_go_of_nothing(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "CLOSE_S", 0.05)
    held = plane.engine.script = Held()
    asking = asyncio.create_task(collect(plane.dispatch()))
    await until(lambda: plane.engine.running == 1)
    await plane.service.close()
    with pytest.raises(WorkerLeftError, match="shutting down"):
        await asking
    held.let_go.set()
    await until(lambda: plane.service.active_requests == 0)


@only_shm
async def test_nothing_of_a_service_runs_on_once_it_is_closed(plane: Plane) -> None:
    """pyzmq would read from the socket that gets the closed one's memory."""
    assert not plane.serving.done()
    await plane.service.close()
    assert all(task.done() for task in plane.service._loops)
    await asyncio.wait_for(plane.serving, 60)
    await plane.service.close()
    await plane.service.run()


async def test_a_frontend_that_came_back_keeps_its_memory_when_its_old_session_ends(
    plane: Plane,
) -> None:
    """Its old session ends late, since its engine is slow."""
    held = plane.engine.script = Held()
    asking = asyncio.create_task(collect(plane.dispatch(name="old")))
    await until(lambda: plane.engine.running == 1)
    newer = await another_link(plane)
    assert newer.reply == plane.link.reply
    await plane.link.close()
    held.let_go.set()
    await until(lambda: len(plane.service._sessions) == 1 and not plane.service._ending)
    with pytest.raises(WorkerLostError):
        await asking

    plane.engine.script = ScriptedEngine().script
    for name in ("cat", "dog"):
        item = media(name, 7)
        request = Submit(RequestId(name), [1, 2], SamplingParams(), [item.part], [])
        answers = await collect(newer.dispatch(request, await plane.send(item)))
        assert not any(isinstance(answer, Nack | Failed) for answer in answers)
        assert answers[0] == Ack(RequestId(name), [MmHash(name)])
    await newer.close()


@only_shm
async def test_hellos_that_overlap_leave_one_session_and_one_hold(plane: Plane) -> None:
    twice = Raw(plane)
    hello = Hello(PROTOCOL_VERSION, Incarnation("raw"), plane.media_sender.offer())
    await twice.say(hello)
    await twice.say(hello)
    await twice.hear(Welcome)
    await until(lambda: len(plane.service._sessions) == 2 and not plane.service._ending)
    shm = plane.service._media_receiver._ends["shm"]
    assert isinstance(shm, ShmReceiver)
    holds = shm._attachments._holds
    assert list(holds.values()) == [2], "ours and theirs"
    twice.close()


@only_shm
async def test_a_flood_of_hellos_makes_one_task_for_each_frontend(
    monkeypatch: pytest.MonkeyPatch, plane: Plane
) -> None:
    may_attach = asyncio.Event()
    attached: list[TransferOffer] = []
    attach = MediaReceiver.attach

    async def slow(receiver: MediaReceiver, offer: TransferOffer) -> Any:
        attached.append(offer)
        await may_attach.wait()
        return await attach(receiver, offer)

    monkeypatch.setattr(MediaReceiver, "attach", slow)
    flood = Raw(plane)
    for _ in range(500):
        await flood.say(Hello(PROTOCOL_VERSION, Incarnation("raw"), OFFER))
    other = Raw(plane)
    await other.say(Hello(PROTOCOL_VERSION, Incarnation("other"), OFFER))
    await until(lambda: len(attached) == 2)
    assert len(plane.service._asides) == 2
    may_attach.set()
    await other.hear(Welcome)
    flood.close()
    other.close()


@only_shm
async def test_more_frontends_than_a_worker_takes_are_told(
    monkeypatch: pytest.MonkeyPatch, plane: Plane, raw: Raw
) -> None:
    monkeypatch.setattr(service_module, "MAX_SESSIONS", 2)  # the plane's own, and raw
    late = Raw(plane)
    await late.say(Hello(PROTOCOL_VERSION, Incarnation("late"), OFFER))
    assert "2 frontends already" in (await late.hear(Goodbye)).reason
    late.close()
    plane.engine.script = never
    await raw.say(submit("r"))
    await until(lambda: plane.engine.running == 1)


@only_shm
async def test_a_flood_of_offers_ends_its_session_only(
    monkeypatch: pytest.MonkeyPatch, plane: Plane, raw: Raw
) -> None:
    monkeypatch.setattr(service_module, "MAX_SESSION_ASIDES", 100)
    may_attach = asyncio.Event()

    async def slow(receiver: MediaReceiver, offer: TransferOffer) -> Any:
        await may_attach.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(MediaReceiver, "attach", slow)
    for _ in range(500):
        await raw.say(Offer(OFFER))
    assert "more than this worker can answer" in (await raw.hear(Goodbye)).reason
    assert len(plane.service._asides) <= 100
    may_attach.set()
    await until(lambda: not plane.service._asides)
    plane.engine.script = never
    asking = asyncio.create_task(collect(plane.link.dispatch(submit("r"), [])))
    await until(lambda: plane.engine.running == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@only_shm
async def test_a_message_of_too_many_bytes_beside_tensors_ends_its_session_only(
    monkeypatch: pytest.MonkeyPatch, plane: Plane, raw: Raw
) -> None:
    monkeypatch.setattr(service_module, "MAX_SUBMIT_BYTES", 1 << 16)
    await raw.say(msgspec.structs.replace(submit("r"), prompt_token_ids=[1 << 20] * 40_000))
    assert "bytes beside its tensors" in (await raw.hear(Goodbye)).reason
    assert not plane.engine.running


FRAME = memoryview(bytes(1 << 10))


def with_frames(message: ToWorker, count: int) -> list[bytes]:
    codec: Codec[ToFrontend] = Codec(ToFrontend)
    return [bytes(frame) for frame in codec.encode(message, [FRAME] * count)]


@only_shm
async def test_requests_of_more_frames_than_a_worker_can_hold_are_left_to_others(
    monkeypatch: pytest.MonkeyPatch, plane: Plane, raw: Raw
) -> None:
    monkeypatch.setattr(service_module, "MAX_FRAMES_BYTES", 3 * len(FRAME))
    plane.engine.script = never
    await raw.say_frames(with_frames(submit("large"), 4))
    failed = await raw.hear(Failed)
    assert failed.request_id == "large" and failed.kind is FailureKind.BUSY
    await raw.say_frames(with_frames(submit("first"), 2))
    await until(lambda: plane.engine.running == 1)
    embeds = torch.zeros(len(FRAME) // 2, dtype=torch.float32)
    for message in (submit("second"), msgspec.structs.replace(submit("r"), prompt_embeds=embeds)):
        await raw.say_frames(with_frames(message, 0 if message.request_id == "r" else 2))
        failed = await raw.hear(Failed)
        assert failed.kind is FailureKind.BUSY and "bytes of media already" in failed.message
    await raw.say(submit("without"))
    await until(lambda: plane.engine.running == 2)
    await raw.say(Abort(RequestId("first")))
    await raw.hear(Failed)
    await raw.say_frames(with_frames(submit("second"), 2))
    await until(lambda: plane.engine.running == 2)


@only_shm
async def test_supplies_of_more_frames_than_a_worker_can_hold_end_their_request(
    monkeypatch: pytest.MonkeyPatch, plane: Plane, raw: Raw
) -> None:
    monkeypatch.setattr(service_module, "MAX_FRAMES_BYTES", 3 * len(FRAME))
    await raw.say(msgspec.structs.replace(submit("r"), media=[media("cat", 7).part]))
    await raw.hear(Nack)
    await raw.say_frames(with_frames(Supply(RequestId("r"), []), 4))
    failed = await raw.hear(Failed)
    assert failed.request_id == "r" and failed.kind is FailureKind.BUSY


@only_shm
async def test_a_request_of_more_media_than_any_has_fails(plane: Plane, raw: Raw) -> None:
    many: list[bytes] = [b""] * (MAX_MEDIA + 1)
    for message in (
        msgspec.structs.replace(submit("r"), shipments=many),
        msgspec.structs.replace(submit("r"), media=[media("cat", 7).part] * len(many)),
    ):
        await raw.say(message)
        failed = await raw.hear(Failed)
        assert failed.kind is FailureKind.PROTOCOL and str(MAX_MEDIA) in failed.message
    assert not plane.engine.seen


@only_shm
async def test_a_request_that_no_worker_takes_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, plane: Plane
) -> None:
    monkeypatch.setattr(link, "MAX_SUBMIT_BYTES", 1 << 16)
    large = msgspec.structs.replace(submit("r"), prompt_token_ids=[1 << 20] * 40_000)
    with pytest.raises(UnsendableRequestError, match="bytes beside tensors"):
        await collect(plane.link.dispatch(large, []))
    assert plane.link.active_requests == 0

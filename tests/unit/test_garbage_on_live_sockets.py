"""Hostile messages at sockets that serve: who sends them gets nowhere, others go on."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from backend_worker.plane.media_receiver import MediaReceiver
from backend_worker.plane.service import WorkerService
from common.errors import WorkerLostError
from common.identity import Incarnation, RequestId, WorkerId
from common.observability.telemetry import INTERNAL_ERRORS, UNDECODABLE_MESSAGES
from common.request_plane.protocol import (
    PROTOCOL_VERSION,
    Hello,
    Leave,
    Output,
    Submit,
    ToFrontend,
    ToWorker,
    Welcome,
)
from common.request_plane.wire import Codec
from common.transfer.handshake import TransferOffer, TransferReply
from common.transfer.transports import receivers
from frontend.workers.link import WorkerLink
from tests.fakes.cards import make_card
from tests.fakes.damage import damaged_bytes, damaged_frames, hostile_frames, hostile_json
from tests.fakes.engine import ScriptedEngine, no_rendering
from tests.fakes.messages import OFFER, TO_FRONTEND_SIDE, TO_WORKER_SIDE
from tests.waiting import until

LIVE = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)
BAD_OFFER = hostile_json([OFFER.model_dump_json().encode()]) | damaged_bytes([b"{}"])


def undecodable(side: str) -> float:
    return UNDECODABLE_MESSAGES.labels(side)._value.get()


def internal_errors() -> dict[str, float]:
    """Mistakes of ours, by place."""
    (metric,) = INTERNAL_ERRORS.collect()
    return {
        each.labels["where"]: each.value
        for each in metric.samples
        if each.name.endswith("_total") and each.value
    }


@asynccontextmanager
async def nothing_escapes() -> AsyncIterator[None]:
    """No task may end with an error that nobody looked at."""
    escaped: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    internal = internal_errors()
    yield
    gc.collect()  # an error is reported when its task goes
    assert not escaped
    assert internal_errors() == internal


def to_worker(message: msgspec.Struct) -> list[bytes]:
    codec: Codec[ToWorker] = Codec(ToWorker)
    return [bytes(frame) for frame in codec.encode(message)]


@given(
    st.lists(
        hostile_frames(TO_WORKER_SIDE.originals)
        | damaged_frames(TO_WORKER_SIDE.originals)
        | st.lists(st.binary(max_size=20), min_size=1, max_size=4)
        | BAD_OFFER.map(lambda offer: to_worker(Hello(PROTOCOL_VERSION, Incarnation("x"), offer))),
        max_size=40,
    )
)
@LIVE
async def test_a_worker_serves_its_frontends_whatever_a_stranger_says(
    messages: list[list[bytes]],
) -> None:
    engine = ScriptedEngine()
    service = WorkerService(
        engine,
        MediaReceiver(receivers(no_rendering)),
        WorkerId("w0"),
        Incarnation("i0"),
        "tcp://127.0.0.1:0",
    )
    serving = asyncio.create_task(service.run())
    context = zmq.asyncio.Context()
    card = make_card(request_endpoint=service.endpoint)
    link = WorkerLink(card, context, Incarnation("f"), lambda status: None)
    offer = TransferOffer().model_dump_json().encode()
    async with nothing_escapes(), asyncio.timeout(60):
        await link.open(offer)
        stranger = context.socket(zmq.DEALER)
        stranger.connect(service.endpoint)
        # With a session he gets further.
        await stranger.send_multipart(to_worker(Hello(PROTOCOL_VERSION, Incarnation("x"), offer)))
        for frames in messages:
            await stranger.send_multipart(frames)
        before = undecodable("worker")
        await stranger.send_multipart([b"\x01\x00\x00\x00", b"\xc1"])
        await until(lambda: undecodable("worker") > before)
        for name in ("one", "two"):
            submit = Submit(RequestId(name), [1], SamplingParams(), [], [])
            *_, last = [answer async for answer in link.dispatch(submit, [])]
            assert isinstance(last, Output) and last.finished
        await stranger.send_multipart(to_worker(Leave()))
        await until(lambda: service.active_requests == 0 and engine.running == 0)
        await link.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await service.close()
        stranger.close(linger=0)
        context.destroy(linger=0)


@given(
    st.lists(
        hostile_frames(TO_FRONTEND_SIDE.originals)
        | damaged_frames(TO_FRONTEND_SIDE.originals)
        | st.lists(st.binary(max_size=20), min_size=1, max_size=4),
        max_size=40,
    )
)
@LIVE
async def test_a_frontend_leaves_a_worker_that_talks_nonsense(messages: list[list[bytes]]) -> None:
    codec: Codec[ToWorker] = Codec(ToWorker)
    context = zmq.asyncio.Context()
    worker = context.socket(zmq.ROUTER)
    port = worker.bind_to_random_port("tcp://127.0.0.1")
    card = make_card(request_endpoint=f"tcp://127.0.0.1:{port}")
    link = WorkerLink(card, context, Incarnation("f"), lambda status: None)

    async def say(message: ToFrontend) -> None:
        await worker.send_multipart([address, *codec.encode(message)])

    async with nothing_escapes(), asyncio.timeout(60):
        opening = asyncio.create_task(link.open(TransferOffer().model_dump_json().encode()))
        address, *_ = await worker.recv_multipart()
        reply = TransferReply().model_dump_json().encode()
        await say(Welcome(PROTOCOL_VERSION, WorkerId("w0"), Incarnation("i0"), reply))
        await opening
        submit = Submit(RequestId("ours"), [1], SamplingParams(), [], [])
        asking = asyncio.ensure_future(anext(link.dispatch(submit, [])))
        for frames in messages:
            await worker.send_multipart([address, *frames])
        before = undecodable("frontend")
        await worker.send_multipart([address, b"\x01\x00\x00\x00", b"\xc1"])
        await until(lambda: undecodable("frontend") > before)
        assert isinstance(await link.lost(), WorkerLostError)
        await asyncio.gather(asking, return_exceptions=True)
        assert link.active_requests == 0
        await link.close()
        worker.close(linger=0)
        context.destroy(linger=0)

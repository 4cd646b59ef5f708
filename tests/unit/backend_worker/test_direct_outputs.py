import asyncio
import gc
import inspect
import random
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import torch
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.outputs import LogprobsTensors

from backend_worker.engine.outputs import DirectLLM, DirectOutputs, take_outputs
from backend_worker.engine.vllm_engine import Items
from common.identity import RequestId
from common.request_plane.protocol import Failed, FailureKind, Output, Outputs, Submit, ToFrontend
from tests.fakes.engine import output
from tests.fakes.plane import Plane, collect, open_plane
from tests.waiting import until

_ADD_REQUEST = AsyncLLM.add_request


def test_engines_give_back_where_they_leave_outputs() -> None:
    assert inspect.signature(_ADD_REQUEST).return_annotation is RequestOutputCollector
    assert "add_request" in AsyncLLM.generate.__code__.co_names


@pytest.fixture(autouse=True)
def without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def add_request(_: AsyncLLM) -> RequestOutputCollector:
        return RequestOutputCollector(RequestOutputKind.DELTA, "r")

    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    monkeypatch.setattr(AsyncLLM, "__del__", lambda _: None)


async def a_collector() -> RequestOutputCollector:
    return await DirectLLM.__new__(DirectLLM).add_request()


async def test_all_but_the_last_are_offered_in_order() -> None:
    offered, takes = list[str](), True

    def take(one: RequestOutput) -> bool:
        offered.append(one.outputs[0].text)
        return takes

    take_outputs(take)
    collector = await a_collector()
    for text in "ab":
        collector.put(output(text, finished=False))
    assert collector.get_nowait() is None
    takes = False
    for text in "cd":
        collector.put(output(text, finished=False))
    assert offered == [*"abc"], "d waits behind c"
    assert (await collector.get()).outputs[0].text == "cd"
    takes = True
    collector.put(output("e", finished=True))
    assert offered == [*"abc"]
    assert (await collector.get()).finished


async def test_without_anybody_to_take_them_they_wait() -> None:
    collector = await asyncio.create_task(_made_elsewhere())
    collector.put(output("a", finished=False))
    assert (await collector.get()).outputs[0].text == "a"


async def _made_elsewhere() -> RequestOutputCollector:
    return await a_collector()


class Steps:
    """A script that answers as an engine does: whatever was put where its task finds it."""

    def __init__(self) -> None:
        self.collectors: dict[str, RequestOutputCollector] = {}

    async def __call__(self, submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        collector = self.collectors[submit.request_id] = await a_collector()
        finished = False
        while not finished:
            one = collector.get_nowait() or await collector.get()
            assert isinstance(one, RequestOutput)
            finished = one.finished
            yield one


async def test_answers_are_whole_however_their_outputs_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some are taken as they are made; others wait, while there is no room, or for a task."""
    dice = random.Random(7)
    async with open_plane("inline") as plane:
        steps = plane.engine.script = Steps()
        send_now, together = plane.service._send_now, list[int]()

        async def at_times(address: bytes, message: ToFrontend) -> bool:
            if isinstance(message, Outputs):
                if dice.random() < 0.3:
                    return False
                together.append(len(message.outputs))
            return await send_now(address, message)

        monkeypatch.setattr(plane.service, "_send_now", at_times)
        names = [f"r{number}" for number in range(8)]
        asking = {name: asyncio.create_task(collect(plane.dispatch(name=name))) for name in names}
        await until(lambda: len(steps.collectors) == len(names))
        for step in range(60):
            for name in names:
                steps.collectors[name].put(output(f"{name} {step},", finished=step == 59))
            await asyncio.sleep(dice.choice((0, 0, 0.001)))
        for name, answers in asking.items():
            said = [one for one in await answers if isinstance(one, Output)]
            text = "".join(one.outputs[0].text for one in said)
            assert text == "".join(f"{name} {step}," for step in range(60))
            assert [one.finished for one in said] == [False] * (len(said) - 1) + [True]
        assert max(together) > 1
        await until(lambda: plane.service.active_requests == 0)


async def test_nothing_is_taken_behind_the_end_of_a_request() -> None:
    async with open_plane("inline") as plane:
        steps = plane.engine.script = Steps()
        asking = asyncio.create_task(collect(plane.dispatch()))
        await until(lambda: "r" in steps.collectors)
        collector = steps.collectors["r"]
        await _first_output(plane, collector)
        collector.put(output("second", finished=False))
        collector.put(output("\ud83d", finished=False))  # it has no encoding
        failed = (await asking)[-1]
        assert isinstance(failed, Failed) and failed.kind is FailureKind.PROTOCOL
        for session in plane.service._sessions.values():
            collector.put(output("too late", finished=False))
            assert not session.outbox._waiting
        assert await collector.get()


async def _first_output(plane: Plane, collector: RequestOutputCollector) -> None:
    dispatch = plane.link._dispatches[RequestId("r")]
    collector.put(output("first", finished=False))
    await until(lambda: collector.output is None and not dispatch.unread)


async def test_an_output_that_cannot_be_read_ends_one_request_alone() -> None:
    outputs = DirectOutputs(None, log_stats=False)
    params = SamplingParams(detokenize=False, logprobs=1, output_kind=RequestOutputKind.DELTA)
    collectors = {}
    for name in ("odd", "other"):
        collectors[name] = RequestOutputCollector(RequestOutputKind.DELTA, name)
        request = EngineCoreRequest(
            name, [1], None, params, None, 0.0, None, None, None, external_req_id=name
        )
        outputs.add_request(request, None, queue=collectors[name])
    token = LogprobsTensors(torch.tensor([[7]]), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int))
    known: Any = token.tolists()
    odd: Any = "no log probabilities"
    for logprobs in ((known, known), (odd, known)):
        both = zip(collectors, logprobs, strict=True)
        made = [EngineCoreOutput(name, [7], new_logprobs=each) for name, each in both]
        outputs.process_outputs(made)
    with pytest.raises(RuntimeError, match="its output can't be read"):
        await collectors["odd"].get()
    said = await collectors["other"].get()
    assert isinstance(said, RequestOutput) and said.outputs[0].token_ids == [7, 7]


async def test_a_request_is_free_as_soon_as_it_ends() -> None:
    async with open_plane("inline") as plane:
        steps = plane.engine.script = Steps()
        gc.disable()
        try:
            asking = asyncio.create_task(collect(plane.dispatch()))
            await until(lambda: bool(steps.collectors))
            ((_, collector),) = steps.collectors.items()
            request = weakref.ref(vars(collector)["take"].__self__)
            collector.put(output("a", finished=True))
            await asking
            steps.collectors.clear()
            del collector
            await until(lambda: request() is None)
        finally:
            gc.enable()

"""Whole requests over two workers, whose engines are scripted. Everything else is real:
links, sessions, routing, retries, seams."""

import asyncio
import gc
import itertools
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
)
from contextlib import aclosing
from typing import Any

import pytest
import torch
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from backend_worker.engine.vllm_engine import Items
from backend_worker.plane import service as service_module
from backend_worker.plane.service import WorkerService
from common.errors import (
    EngineGoneError,
    NoWorkerError,
    TransferError,
    WorkerBusyError,
    WorkerDiedError,
    causes,
)
from common.identity import Incarnation, MmHash, WorkerId
from common.request_plane.protocol import Nack, Submit, ToFrontend
from frontend.request import retry, runner
from frontend.request.deadlines import Deadlines
from frontend.request.resume import sampling_of
from frontend.request.retry import FURTHER, RetryBudget
from frontend.request.runner import MAX_ID_LEN
from frontend.request.settings import FaultSettings
from frontend.request_context import begin
from frontend.router.decision import Decision
from frontend.router.hashing import LoraKey
from frontend.router.inputs import RoutingRequest
from frontend.workers import link as worker_link
from tests.fakes.model import ScriptedModel
from tests.fakes.reports import rank_report
from tests.fakes.request_lab import ANSWER, Lab, Script
from tests.waiting import until


@pytest.fixture
async def lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    lab = Lab(getattr(request, "param", FaultSettings()))
    await lab.add("w0")
    await lab.add("w1")
    yield lab
    await lab.close()


def settings(**values: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("lab", [FaultSettings(**values)], indirect=True)


def text(outputs: list[RequestOutput]) -> str:
    return "".join(one.text for output in outputs for one in output.outputs)


def ids(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for one in output.outputs for token in one.token_ids]


GONE = EngineGoneError("the worker's engine died")


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
@pytest.mark.parametrize("steps", [0, 1, 5, 16, 17, 40])
async def test_a_lost_worker_goes_unnoticed(lab: Lab, steps: int, kind: RequestOutputKind) -> None:
    lab.disturb(steps, GONE)
    outputs = await lab.ask(output_kind=kind)
    assert text(outputs) == ANSWER and ids(outputs) == lab.model.answer
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) == 1 or kind is RequestOutputKind.DELTA
    assert outputs[-1].prompt_token_ids == lab.model.prompt
    (first, _), (second, asked) = lab.asked
    assert first != second
    assert (asked.prompt_token_ids == lab.model.prompt) == (steps == 0)


async def test_the_end_is_the_same_as_of_a_stream(lab: Lab) -> None:
    (whole,) = await lab.ask(output_kind=RequestOutputKind.FINAL_ONLY, logprobs=0)
    (one,) = whole.outputs
    assert (one.text, one.finish_reason) == (ANSWER, "stop")
    assert list(one.token_ids) == lab.model.answer
    assert one.logprobs is not None and len(one.logprobs) == len(lab.model.answer)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
async def test_log_probabilities_are_lists_of_numbers(lab: Lab, kind: RequestOutputKind) -> None:
    outputs = await lab.ask(output_kind=kind, logprobs=2)
    given = [one.logprobs for output in outputs for one in output.outputs if one.token_ids]
    assert given and all(isinstance(each, FlatLogprobs) for each in given)


async def test_a_worker_that_closes_the_connection_amid_an_answer(lab: Lab) -> None:
    lab.disturb(7)
    answers = lab.generate("r", temperature=0, max_tokens=200, output_kind=RequestOutputKind.DELTA)
    outputs: list[RequestOutput] = []
    async with asyncio.timeout(60), aclosing(answers):
        async for output in answers:
            outputs.append(output)
            if len(ids(outputs)) == 7 and len(lab.asked) == 1:
                await lab.services[lab.asked[0][0]].close()
    assert text(outputs) == ANSWER


@settings(output_timeout_s=1.0)
@pytest.mark.parametrize("steps", [0, 6])
async def test_a_worker_that_hangs_while_its_heart_beats(lab: Lab, steps: int) -> None:
    lab.disturb(steps)
    assert text(await lab.ask()) == ANSWER
    hung = lab.engines[lab.asked[0][0]]
    await until(lambda: hung.running == 0)
    assert hung.aborted == 1


@pytest.mark.parametrize("odd", ["media that nobody has", "nothing, once it runs", "nothing"])
async def test_an_answer_that_nobody_asked_for_is_its_workers_fault(lab: Lab, odd: str) -> None:
    lab.disturb(0 if odd == "nothing" else 6)
    asking = asyncio.create_task(lab.ask())
    await until(lambda: any(engine.running for engine in lab.engines.values()))
    ((name, submit),) = lab.asked
    missing = [MmHash("unknown")] if odd.startswith("media") else []
    await lab.links[WorkerId(name)]._deliver([Nack(submit.request_id, missing, "not_held")])
    assert text(await asking) == ANSWER
    assert [worker for worker, _ in lab.asked][1:] != [name]
    await until(lambda: not lab.engines[name].running)


@settings(request_timeout_s=1.0)
@pytest.mark.parametrize("steps", [0, 6])
async def test_a_late_request_is_a_504_and_its_engine_stops(lab: Lab, steps: int) -> None:
    lab.disturb(steps)
    with pytest.raises(GracefulHTTPError, match=r"not done within 1 s|time was over") as caught:
        await lab.ask()
    assert caught.value.http_status == 504
    ((name, asked),) = lab.asked
    assert asked.timeout_s is not None and 0 < asked.timeout_s <= 1.0
    await until(lambda: lab.engines[name].running == 0)
    assert lab.engines[name].aborted == 1


async def test_who_leaves_stops_the_engine(lab: Lab) -> None:
    lab.disturb(6)
    asking = asyncio.create_task(lab.ask())
    await until(lambda: any(engine.running for engine in lab.engines.values()))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not any(engine.running for engine in lab.engines.values()))
    await until(lambda: not any(link.active_requests for link in lab.links.values()))


async def test_what_cannot_go_on_says_why(lab: Lab) -> None:
    lab.disturb(6, GONE)
    with pytest.raises(GracefulHTTPError, match="penalty counts what was answered") as caught:
        await lab.ask(temperature=0.8, presence_penalty=0.5)
    assert caught.value.http_status == 503
    assert len(lab.asked) == 1


async def test_what_nobody_has_seen_begins_again(lab: Lab) -> None:
    lab.disturb(18, GONE)
    outputs = await lab.ask(
        temperature=0.8, presence_penalty=0.5, output_kind=RequestOutputKind.FINAL_ONLY
    )
    assert text(outputs) == ANSWER
    assert lab.asked[1][1].prompt_token_ids == lab.model.prompt


async def test_a_seeded_answer_is_replayed(lab: Lab) -> None:
    lab.disturb(18, GONE)
    outputs = await lab.ask(temperature=0.8, seed=3)
    assert text(outputs) == ANSWER and ids(outputs) == lab.model.answer
    assert lab.asked[1][1].prompt_token_ids == lab.model.prompt


async def test_a_stop_string_found_by_us_stops_the_engine(lab: Lab) -> None:
    lab.disturb(9, GONE)
    outputs = await lab.ask(stop=["schön"])
    assert text(outputs) == ANSWER[: ANSWER.index("schön")]
    assert outputs[-1].outputs[0].stop_reason == "schön"
    await until(lambda: not any(engine.running for engine in lab.engines.values()))
    await until(lambda: not any(link.active_requests for link in lab.links.values()))


@settings(migration_limit=1)
async def test_the_last_failure_is_told_when_nobody_is_left(lab: Lab) -> None:
    for name, engine in lab.engines.items():
        engine.script = lab.speaking(name, 3, EngineGoneError(f"{name} died"))
    with pytest.raises(GracefulHTTPError, match=r"w\d died") as caught:
        await lab.ask()
    assert caught.value.http_status == 503
    assert len(lab.asked) == 2


async def until_all_failed(lab: Lab) -> "asyncio.Task[list[RequestOutput]]":
    """A request that every worker there is failed on, each after a few steps. None died: then
    the second would have been the last."""
    for name, engine in lab.engines.items():
        engine.script = lab.speaking(name, 3, TransferError(f"{name} failed"))
    asking = asyncio.create_task(lab.ask())
    await until(lambda: len(lab.asked) == 2)
    await until(lambda: not any(link.active_requests for link in lab.links.values()))
    return asking


@pytest.mark.parametrize("name", ["w2", "w0"])
async def test_a_request_that_lost_all_workers_waits_for_one(lab: Lab, name: str) -> None:
    """For another, or for one that failed on it and is started again."""
    asking = await until_all_failed(lab)
    if name in lab.links:
        await lab.remove(name)
    await lab.add(name)
    outputs = await asking
    assert text(outputs) == ANSWER and ids(outputs) == lab.model.answer
    assert [asked for asked, _ in lab.asked][2:] == [name]


async def test_further_calls_of_a_request_are_not_refused_for_busy_workers(lab: Lab) -> None:
    """300 prompts of 700 tokens, alone on a worker, got 503 once they filled its cache."""
    begin()
    await lab.ask(name="first prompt")
    for name in lab.engines:
        lab.router.load.reported(WorkerId(name), [rank_report(active=1, kv_usage=1.0)])
    assert (await lab.ask(name="second prompt"))[-1].finished
    begin()
    with pytest.raises(VLLMError, match="every worker is busy"):
        await lab.ask(name="another request")


async def test_a_worker_that_was_busy_is_asked_again(lab: Lab) -> None:
    """It is the only one, so there is no other to go to, and none joins."""
    await lab.remove("w1")
    lab.disturb(0, WorkerBusyError("too much to do"))
    assert text(await lab.ask()) == ANSWER
    assert [asked for asked, _ in lab.asked] == ["w0", "w0"]


async def test_a_worker_that_stays_busy_is_asked_until_it_is_not(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "BUSY_S", 0.01)
    monkeypatch.setattr(runner, "POLL_INTERVAL_S", 0.01)
    await lab.remove("w1")
    engine = lab.engines["w0"]
    refused: list[Submit] = []

    async def busy(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        refused.append(submit)
        if len(refused) == 8:  # more often than it would be given to workers that fail
            engine.script = lab.speaking("w0")
        raise WorkerBusyError("too much to do")
        yield

    engine.script = busy
    assert text(await lab.ask()) == ANSWER
    assert len(refused) == 8


@pytest.mark.parametrize("steps", [0, 9])
async def test_a_request_goes_on_where_a_pause_sent_it_away(lab: Lab, steps: int) -> None:
    """Once the worker serves again, which is no arrival."""
    await lab.remove("w1")
    lab.disturb(steps, WorkerBusyError("it is paused"))
    resting = lab.router.resting
    resting.add(WorkerId("w0"))
    asking = asyncio.create_task(lab.ask())
    with pytest.raises(GracefulHTTPError, match="paused or asleep") as refused:
        await asking  # one that no worker has accepted does not wait
    # The server follows causes, on its event loop, to where they end.
    chain = list(itertools.islice(causes(refused.value), 9))
    assert [type(one) for one in chain] == [GracefulHTTPError, NoWorkerError]
    assert chain[1].__cause__ is None
    resting.discard(WorkerId("w0"))
    asking = asyncio.create_task(lab.ask())
    await until(lambda: len(lab.asked) == 1)
    resting.add(WorkerId("w0"))
    await until(lambda: not any(link.active_requests for link in lab.links.values()))
    resting.discard(WorkerId("w0"))
    assert text(await asking) == ANSWER
    assert [asked for asked, _ in lab.asked] == ["w0", "w0"]


async def test_a_request_goes_on_where_an_operator_lets_it(lab: Lab) -> None:
    """Its worker fails while the other is drained, which is then reinstated."""
    drained = lab.router.drained
    drained[WorkerId("w1")] = Incarnation("w1")
    lab.engines["w0"].script = lab.speaking("w0", 3, TransferError("w0 failed"))
    asking = asyncio.create_task(lab.ask())
    await until(lambda: len(lab.asked) == 1)
    await until(lambda: not any(link.active_requests for link in lab.links.values()))
    del drained[WorkerId("w1")]
    assert text(await asking) == ANSWER
    assert [asked for asked, _ in lab.asked] == ["w0", "w1"]


@settings(worker_wait_s=3.0)
async def test_a_request_goes_on_at_the_successor_of_the_worker_that_it_lost(lab: Lab) -> None:
    """A rolling restart under one name: the successor joins first, then the request is lost."""
    await lab.remove("w1")
    lab.engines["w0"].script = lab.speaking("w0", 3)
    asking = asyncio.create_task(lab.ask())
    await until(lambda: len(lab.asked) == 1)
    link, service = lab.links.pop(WorkerId("w0")), lab.services.pop("w0")
    await lab.add("w0")
    await service.close()
    assert text(await asking) == ANSWER
    await link.close()


def spend_all_retries(lab: Lab) -> RetryBudget:
    budget = lab.runner.retry_budget = RetryBudget(0.0)
    while budget.take() == 0:
        pass
    return budget


async def test_a_request_waits_for_the_retry_budget(lab: Lab) -> None:
    """Both before and after its first output; it goes on once there is some."""
    for steps in (0, 9):
        budget = spend_all_retries(lab)
        lab.disturb(steps, GONE)
        asked = len(lab.asked)
        asking = asyncio.create_task(lab.ask())
        await until(lambda asked=asked: len(lab.asked) > asked)  # type: ignore[misc]
        await until(lambda: not any(link.active_requests for link in lab.links.values()))
        lab.arrival()
        await asyncio.sleep(0.05)
        assert not asking.done() and len(lab.asked) == asked + 1
        budget._retries = 0.0
        lab.arrival()
        assert text(await asking) == ANSWER
        assert len(lab.asked) == asked + 2


@settings(worker_wait_s=0.1)
async def test_it_does_not_wait_for_ever_for_the_budget(lab: Lab) -> None:
    spend_all_retries(lab)
    lab.disturb(9, GONE)
    with pytest.raises(GracefulHTTPError, match="too many requests were lately"):
        await lab.ask()


@settings(request_timeout_s=100.0)
async def test_a_request_that_is_late_already_does_not_wait(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = await until_all_failed(lab)
    monkeypatch.setattr(Deadlines, "left_s", lambda self: 0.0)
    lab.arrival()
    with pytest.raises(GracefulHTTPError, match="not done within 100 s"):
        await asking


async def test_it_does_not_wait_when_the_frontend_leaves(lab: Lab) -> None:
    asking = await until_all_failed(lab)
    lab.fleet.closed = True
    lab.fleet.arrival.set()
    with pytest.raises(GenerationError, match=r"w\d failed"):
        await asking


@settings(worker_wait_s=0.1)
async def test_it_does_not_wait_for_ever(lab: Lab) -> None:
    context = begin()
    asking = await until_all_failed(lab)
    assert not context.failed
    with pytest.raises(GenerationError, match=r"w\d failed"):
        await asking
    assert context.failed, "it is counted, though its answer may have begun"


@settings(request_timeout_s=2.0)
async def test_it_waits_no_longer_than_it_may_take(lab: Lab) -> None:
    asking = await until_all_failed(lab)
    with pytest.raises(GracefulHTTPError, match=r"not done within 2 s"):
        await asking


async def says_so(lab: Lab, name: str) -> None:
    raise EngineGoneError(f"{name} died")


async def leaves_dead(lab: Lab, name: str) -> None:
    """Like a worker that finds out about its engine before the request does."""
    lab.engines[name].errored = True
    closing = asyncio.create_task(lab.services[name].close())
    await asyncio.shield(closing)


async def closes_the_connection(lab: Lab, name: str) -> None:
    """As after a kill -9."""
    _silence(lab.services[name])
    closing = asyncio.create_task(lab.services[name].close())
    await asyncio.shield(closing)


async def falls_silent(lab: Lab, name: str) -> None:
    link = lab.links[WorkerId(name)]
    (dispatch,) = link._dispatches.values()
    await until(lambda: link._last_heard > dispatch.since)
    _silence(lab.services[name])
    await asyncio.Event().wait()


async def falls_silent_and_out_of_the_fleet(lab: Lab, name: str) -> None:
    """Its card may run out before its link does."""
    link = lab.links[WorkerId(name)]
    (dispatch,) = link._dispatches.values()
    await until(lambda: link._last_heard > dispatch.since)
    _silence(lab.services[name])
    await until(lambda: time.monotonic() > link._last_heard + worker_link.QUIET_S)
    await link.close("its card is gone")
    await asyncio.Event().wait()


def _silence(service: WorkerService) -> None:
    async def unsent(address: bytes, message: ToFrontend) -> bool:
        return True

    service._send_now = unsent  # type: ignore[method-assign]


@pytest.fixture
def fast_hearts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(worker_link, "PING_INTERVAL_S", 0.05)


Death = Callable[[Lab, str], Awaitable[None]]


def dying(lab: Lab, name: str, steps: int, death: Death) -> Script:
    """Some of the answer, and then a death. One more step each time, since outputs are lost
    with a worker."""

    async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        async for output in stream_of(lab, name, submit, steps + len(lab.asked)):
            yield output
        await death(lab, name)

    return script


async def stream_of(
    lab: Lab, name: str, submit: Submit, steps: int
) -> AsyncGenerator[RequestOutput]:
    lab.asked.append((name, submit))
    assert submit.prompt_token_ids is not None
    told = len(submit.prompt_token_ids) - len(lab.model.prompt)
    sampling = sampling_of(submit)
    for output in lab.model.outputs(submit.prompt_token_ids, sampling, max(0, steps - told)):
        yield output


@settings(migration_limit=9)
@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize(
    "death",
    [
        says_so,
        leaves_dead,
        closes_the_connection,
        falls_silent,
        falls_silent_and_out_of_the_fleet,
    ],
)
@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "seeded"])
async def test_no_third_engine_dies_of_a_request(
    lab: Lab,
    death: Death,
    steps: int,
    seed: int | None,
    fast_hearts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it dies, and wherever in the answer."""
    if death is falls_silent:
        monkeypatch.setattr(worker_link, "SESSION_TIMEOUT_S", 1.0)
        monkeypatch.setattr(worker_link, "QUIET_S", 0.2)  # a stall of ours is no silence
    if death is falls_silent_and_out_of_the_fleet:
        monkeypatch.setattr(worker_link, "QUIET_S", 0.5)
    await lab.add("w2")
    await lab.add("w3")
    for name, engine in lab.engines.items():
        engine.script = dying(lab, name, steps, death)
    with pytest.raises(GenerationError, match="it is engine number 2"):
        await lab.ask(temperature=0.8 if seed else 0.0, seed=seed)
    assert len(lab.asked) == 2


@settings(migration_limit=9)
async def test_an_engine_that_died_far_from_the_last_is_no_repetition(lab: Lab) -> None:
    lab.model = ScriptedModel(ANSWER * 4)
    await lab.add("w2")
    await lab.add("w3")
    places = [1, 1 + FURTHER, 1 + 2 * FURTHER]

    def script(name: str) -> Script:
        async def mortal(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
            steps = places.pop(0) if places else len(lab.model.answer)
            async for output in stream_of(lab, name, submit, steps):
                yield output
            if steps < len(lab.model.answer):
                raise GONE

        return mortal

    for name, engine in lab.engines.items():
        engine.script = script(name)
    assert text(await lab.ask(max_tokens=400)) == ANSWER * 4
    assert len(lab.asked) == 4


@settings(migration_limit=9)
async def test_a_request_is_not_to_blame_for_workers_that_leave(lab: Lab) -> None:
    await lab.add("w2")
    await lab.add("w3")
    leaving = [1, 2, 3]

    def script(name: str) -> Script:
        async def gone(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
            async for output in stream_of(lab, name, submit, 0 if leaving else 1000):
                yield output
            if leaving:
                leaving.pop()
                closing = asyncio.create_task(lab.services[name].close())
                await asyncio.shield(closing)

        return gone

    for name, engine in lab.engines.items():
        engine.script = script(name)
    assert text(await lab.ask()) == ANSWER
    assert len(lab.asked) == 4


@settings(migration_limit=9)
async def test_a_request_is_not_to_blame_for_workers_that_it_never_reached(lab: Lab) -> None:
    await lab.add("w2")
    for name in ("w0", "w1"):
        lab.links[WorkerId(name)]._lose("it closed the connection", WorkerDiedError)
    lab.engines["w2"].script = lab.speaking("w2")
    assert text(await lab.ask()) == ANSWER
    assert [name for name, _ in lab.asked] == ["w2"]


@settings(migration_limit=0)
async def test_a_limit_of_none_moves_nothing(lab: Lab) -> None:
    lab.disturb(3, GONE)
    with pytest.raises(VLLMError, match="engine died"):
        await lab.ask()
    assert len(lab.asked) == 1


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "how", ["undisturbed", "engine died", "connection lost", "unmovable", "deserted"]
)
async def test_a_request_and_its_media_are_free_as_soon_as_it_ends(
    lab: Lab, no_garbage_collection: None, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Media lie in the arena for as long as anything refers to them."""
    if how == "connection lost":
        lab.disturb(5)
        asking = asyncio.create_task(lab.ask())
        await until(lambda: bool(lab.asked))
        await lab.services[lab.asked[0][0]].close()
        assert text(await asking) == ANSWER
        del asking
    elif how == "unmovable":
        lab.disturb(5, GONE)
        with pytest.raises(GracefulHTTPError) as caught:
            await lab.ask(temperature=0.8, presence_penalty=0.5)
        del caught
    elif how == "deserted":
        caplog.set_level(logging.ERROR)  # pytest keeps what is logged, this error too
        lab.disturb(5, GONE)
        lab.fleet.closed = True
        lab.fleet.check = lambda: nobody() if lab.asked else None
        with pytest.raises(GracefulHTTPError) as caught:
            await lab.ask()
        del caught
    else:
        if how == "engine died":
            lab.disturb(5, GONE)
        assert text(await lab.ask()) == ANSWER
    assert len(lab.prompts) == 1
    await until(lambda: lab.prompts[0]() is None)


async def test_requests_that_clients_call_the_same_get_each_its_own_answer(lab: Lab) -> None:
    """All at one worker, the first of them still running when the last comes."""
    await lab.remove("w1")
    engine, go_on = lab.engines["w0"], asyncio.Event()
    speaking = lab.speaking("w0")

    async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        async with aclosing(speaking(submit, items)) as outputs:
            yield await anext(outputs)
            await go_on.wait()
            async for output in outputs:
                yield output

    engine.script = script
    lengths = [3, 200, 7, 11]
    asking = [asyncio.create_task(lab.ask(name="ours", max_tokens=each)) for each in lengths]
    await until(lambda: engine.running == len(lengths))
    assert len(lab.router.in_flight) == len(lengths)
    go_on.set()
    for length, outputs in zip(lengths, await asyncio.gather(*asking), strict=True):
        assert ids(outputs) == lab.model.answer[:length]
        assert outputs[-1].finished
        assert {output.request_id for output in outputs} == {"ours"}
    assert len({submit.request_id for _, submit in lab.asked}) == len(lengths)
    assert not any("ours" in submit.request_id for _, submit in lab.asked)
    found = lab.router.decisions.find("ours")
    assert len(found) == len(lengths)
    assert {one.as_json()["request_id"] for one in found} == {"ours"}
    assert len(lab.router.in_flight) == 0


async def test_who_leaves_while_media_are_lent_counts_nowhere(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = asyncio.Event()

    async def send(*_: object) -> None:
        sending.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(lab.media_sender, "send", send)
    asking = asyncio.create_task(lab.ask())
    await asyncio.wait_for(sending.wait(), 60)
    assert len(lab.router.in_flight) == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert len(lab.router.in_flight) == 0
    assert not any(load.active for load in lab.router.load.view()[0])


def nobody() -> None:
    raise NoWorkerError("no worker is available")


async def test_no_worker_at_all_is_told_as_such(lab: Lab) -> None:
    lab.fleet.check = nobody
    with pytest.raises(GracefulHTTPError, match="no worker is available"):
        await lab.ask()


async def test_a_prompt_of_embeddings_alone_is_sent_without_tokens(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes zeros beside embeddings for tokens, and none at all for a prompt without any."""
    routed: list[RoutingRequest] = []
    route = lab.router.route

    def noted(request: RoutingRequest, **how: Any) -> Decision:
        routed.append(request)
        return route(request, **how)

    monkeypatch.setattr(lab.router, "route", noted)
    length = len(lab.model.prompt)
    await lab.ask()
    lab.embeds = torch.zeros(length, 4)
    (*_, last) = await lab.ask()
    assert [each.embeds and each.embeds.rows for each in routed] == [None, length]
    assert [len(each.token_ids) for each in routed] == [length, length]
    (_, plain), (_, submit) = lab.asked
    assert plain.prompt_token_ids == lab.model.prompt
    assert submit.prompt_token_ids is None
    assert submit.prompt_tokens == length
    assert last.prompt_token_ids is not None
    assert len(last.prompt_token_ids) == length


async def test_a_name_as_long_as_a_book_is_refused(lab: Lab) -> None:
    """Each event of a stream would repeat it, in JSON, while everybody waits."""
    await lab.ask(name="x" * MAX_ID_LEN)
    with pytest.raises(VLLMValidationError, match="1024 characters at most"):
        await lab.ask(name="x" * (MAX_ID_LEN + 1))


# Adapters

STORY = LoRARequest(lora_name="story", lora_int_id=7, lora_path="/s")
KEY = LoraKey("story", "/s")


def has_story(lab: Lab, *names: str) -> None:
    """These workers have the adapter that every request of the lab asks for, and no others."""
    lab.lora = STORY
    for name in lab.engines:
        keys = frozenset({KEY} if name in names else ())
        lab.router.roster.adapters_changed(WorkerId(name), keys, frozenset())


async def test_a_request_runs_where_its_adapter_is(lab: Lab) -> None:
    has_story(lab, "w1")
    assert text(await lab.ask()) == ANSWER
    assert [name for name, _ in lab.asked] == ["w1"]


async def test_an_answer_goes_on_at_another_worker_with_its_adapter(lab: Lab) -> None:
    has_story(lab, "w0", "w1")
    lab.disturb(5, GONE)
    assert text(await lab.ask()) == ANSWER
    assert sorted(name for name, _ in lab.asked) == ["w0", "w1"]


async def test_a_request_is_refused_if_no_worker_with_its_adapter_takes_any(lab: Lab) -> None:
    has_story(lab, "w0")
    lab.router.drained[WorkerId("w0")] = Incarnation("w0")
    with pytest.raises(GracefulHTTPError, match="drained"):
        await lab.ask()
    assert not lab.asked


async def test_an_ejected_worker_has_to_do_if_no_other_has_the_adapter(lab: Lab) -> None:
    has_story(lab, "w0")
    lab.router.ejection.eject(WorkerId("w0"), Incarnation("w0"), "for the test")
    assert text(await lab.ask()) == ANSWER
    assert [name for name, _ in lab.asked] == ["w0"]

"""Whole requests over two workers, whose engines are scripted. Everything else is real:
links, sessions, routing, retries, seams."""

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
import zmq.asyncio
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from backend_worker.engine import Items
from backend_worker.obtain import MediaInlet
from backend_worker.service import WorkerService
from common.errors import EngineGoneError, NoWorkerError
from common.identity import Incarnation, WorkerId
from common.protocol import Submit
from common.transfer.choice import TransferMode
from frontend.deadlines import Deadlines
from frontend.engine_client import RoutedEngineClient
from frontend.fault_settings import FaultSettings
from frontend.media import MediaLender
from frontend.preprocess import ProcessedPrompt
from frontend.retry import RetryBudget
from frontend.router.router import RoutableWorker, Router
from frontend.worker_link import WorkerLink
from tests.ports import free_port
from tests.unit.common.cards import make_card
from tests.unit.frontend.scripted_model import ScriptedModel, stream, tokenizer
from tests.unit.test_request_plane import ScriptedEngine, no_rendering
from tests.waiting import until

ANSWER = "Größe: 3 m² – „schön“ 😀 日本語"

Script = Callable[[Submit, Items], AsyncGenerator[RequestOutput]]


class Lab:
    """Two workers and a client; a preprocessor and a fleet that know what they are told."""

    def __init__(self, settings: FaultSettings) -> None:
        self.model = ScriptedModel(ANSWER)
        self.router = Router()
        self.lender = MediaLender(None, TransferMode.SHM)
        self.context = zmq.asyncio.Context()
        self.links: dict[WorkerId, WorkerLink] = {}
        self.engines: dict[str, ScriptedEngine] = {}
        self.services: dict[str, WorkerService] = {}
        self.serving: list[asyncio.Task[None]] = []
        self.asked: list[tuple[str, Submit]] = []
        self.prompts: list[weakref.ref[ProcessedPrompt]] = []

        async def process(*_: object) -> ProcessedPrompt:
            prompt = ProcessedPrompt(self.model.prompt, [], None, None, None, None, None)
            self.prompts.append(weakref.ref(prompt))
            return prompt

        preprocessor = SimpleNamespace(
            process=process,
            vllm_config=None,
            model_config=None,
            renderer=SimpleNamespace(tokenizer=tokenizer()),
            input_processor=None,
        )
        self.joined: dict[WorkerId, float] = {}
        self.fleet = SimpleNamespace(
            check_available=lambda: None,
            link=lambda worker_id: self.links[worker_id],
            joined_since=lambda worker_id, moment: self.joined[worker_id] > moment,
            arrival=asyncio.Event(),
            closed=False,
        )
        self.client = RoutedEngineClient(
            preprocessor,  # type: ignore[arg-type]
            self.fleet,  # type: ignore[arg-type]
            self.router,
            self.lender,
            settings,
        )

    async def add(self, name: str) -> None:
        engine = self.engines[name] = ScriptedEngine()
        service = WorkerService(
            engine,
            MediaInlet(None, no_rendering),
            WorkerId(name),
            Incarnation(name),
            f"tcp://127.0.0.1:{free_port()}",  # not one that is just being freed
        )
        self.services[name] = service
        self.serving.append(asyncio.create_task(service.run()))
        card = make_card(worker_id=name, incarnation=name, request_endpoint=service.endpoint)
        link = WorkerLink(card, self.context, Incarnation("f"), lambda status: None)
        await link.open(self.lender.offer())
        self.links[WorkerId(name)] = link
        self.joined[WorkerId(name)] = time.monotonic()
        await self.router.add_worker(
            RoutableWorker(
                worker_id=WorkerId(name),
                incarnation=Incarnation(name),
                ranks=(0,),
                block_size=16,
                hash_algorithm="sha256_cbor",
                none_hash=bytes(32),
                event_sources=(),
                kv_tokens=1000,
                max_num_seqs=8,
                prefix_caching=False,
            )
        )
        engine.script = self.speaking(name)
        self.arrival()

    def arrival(self) -> None:
        """Whoever waits for a worker looks again."""
        self.fleet.arrival.set()
        self.fleet.arrival = asyncio.Event()

    async def remove(self, name: str) -> None:
        await self.router.remove_worker(WorkerId(name))
        await self.links.pop(WorkerId(name)).close()
        await self.services.pop(name).close()

    def speaking(self, name: str, steps: int | None = None, then: object = None) -> Script:
        """The model's answer, or its first steps and then an error, or silence."""

        async def script(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
            self.asked.append((name, submit))
            assert submit.prompt_token_ids is not None
            made = self.model.outputs(submit.prompt_token_ids, submit.sampling_params, steps)
            async for output in stream(made):
                yield output
            if isinstance(then, Exception):
                raise then
            if steps is not None:
                await asyncio.Event().wait()

        return script

    def disturb(self, steps: int, then: object = None) -> None:
        """Whoever gets the next request fails after so many steps; later ones succeed."""
        for name, engine in self.engines.items():

            def first(
                submit: Submit, items: Items, name: str = name
            ) -> AsyncGenerator[RequestOutput]:
                for other, each in self.engines.items():
                    each.script = self.speaking(other)
                return self.speaking(name, steps, then)(submit, items)

            engine.script = first

    async def ask(self, **more: Any) -> list[RequestOutput]:
        given = {
            "temperature": 0.0,
            "max_tokens": 200,
            "output_kind": RequestOutputKind.DELTA,
        } | more
        answers = self.client.generate(
            {"type": "token", "prompt_token_ids": self.model.prompt},
            SamplingParams(**given),
            "r",
        )
        async with asyncio.timeout(60), aclosing(answers):
            return [answer async for answer in answers]

    async def close(self) -> None:
        for link in self.links.values():
            await link.close()
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)
        for service in self.services.values():
            await service.close()
        await self.router.close()
        self.context.destroy(linger=0)
        self.lender.close()


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


async def test_a_worker_that_closes_the_connection_amid_an_answer(lab: Lab) -> None:
    lab.disturb(7)
    answers = lab.client.generate(
        {"type": "token", "prompt_token_ids": lab.model.prompt},
        SamplingParams(temperature=0, max_tokens=200, output_kind=RequestOutputKind.DELTA),
        "r",
    )
    outputs: list[RequestOutput] = []
    async with asyncio.timeout(60), aclosing(answers):
        async for output in answers:
            outputs.append(output)
            if len(ids(outputs)) == 7 and len(lab.asked) == 1:
                await lab.services[lab.asked[0][0]].close()
    assert text(outputs) == ANSWER


@settings(output_timeout_s=0.2)
@pytest.mark.parametrize("steps", [0, 6])
async def test_a_worker_that_hangs_while_its_heart_beats(lab: Lab, steps: int) -> None:
    lab.disturb(steps)
    assert text(await lab.ask()) == ANSWER
    hung = lab.engines[lab.asked[0][0]]
    await until(lambda: hung.running == 0)
    assert hung.aborted == 1


@settings(request_timeout_s=0.2)
@pytest.mark.parametrize("steps", [0, 6])
async def test_a_late_request_is_a_504_and_its_engine_stops(lab: Lab, steps: int) -> None:
    lab.disturb(steps)
    with pytest.raises(GracefulHTTPError, match=r"not done within 0\.2 s|time was over") as caught:
        await lab.ask()
    assert caught.value.http_status == 504
    ((name, asked),) = lab.asked
    assert asked.timeout_s is not None and 0 < asked.timeout_s <= 0.2
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


async def until_all_died(lab: Lab) -> "asyncio.Task[list[RequestOutput]]":
    """A request that every worker there is failed on, each after a few steps."""
    for name, engine in lab.engines.items():
        engine.script = lab.speaking(name, 3, EngineGoneError(f"{name} died"))
    asking = asyncio.create_task(lab.ask())
    await until(lambda: len(lab.asked) == 2)
    await until(lambda: not any(link.active_requests for link in lab.links.values()))
    return asking


@pytest.mark.parametrize("name", ["w2", "w0"])
async def test_a_request_that_lost_all_workers_waits_for_one(lab: Lab, name: str) -> None:
    """For another, or for one that died under it and is started again."""
    asking = await until_all_died(lab)
    if name in lab.links:
        await lab.remove(name)
    await lab.add(name)
    outputs = await asking
    assert text(outputs) == ANSWER and ids(outputs) == lab.model.answer
    assert [asked for asked, _ in lab.asked][2:] == [name]


def spend_all_retries(lab: Lab) -> RetryBudget:
    budget = lab.client._retry_budget
    while budget.take() == 0:
        pass
    return budget


@settings(retry_budget=0.0)
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


@settings(worker_wait_s=0.1, retry_budget=0.0)
async def test_it_does_not_wait_for_ever_for_the_budget(lab: Lab) -> None:
    spend_all_retries(lab)
    lab.disturb(9, GONE)
    with pytest.raises(GracefulHTTPError, match="too many requests were lately"):
        await lab.ask()


@settings(request_timeout_s=100.0)
async def test_a_request_that_is_late_already_does_not_wait(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = await until_all_died(lab)
    monkeypatch.setattr(Deadlines, "left_s", lambda self: 0.0)
    lab.arrival()
    with pytest.raises(GracefulHTTPError, match="not done within 100 s"):
        await asking


async def test_it_does_not_wait_when_the_frontend_leaves(lab: Lab) -> None:
    asking = await until_all_died(lab)
    lab.fleet.closed = True
    lab.fleet.arrival.set()
    with pytest.raises(GracefulHTTPError, match=r"w\d died"):
        await asking


@settings(worker_wait_s=0.1)
async def test_it_does_not_wait_for_ever(lab: Lab) -> None:
    asking = await until_all_died(lab)
    with pytest.raises(GracefulHTTPError, match=r"w\d died"):
        await asking


@settings(request_timeout_s=0.5)
async def test_it_waits_no_longer_than_it_may_take(lab: Lab) -> None:
    asking = await until_all_died(lab)
    with pytest.raises(GracefulHTTPError, match=r"not done within 0\.5 s"):
        await asking


async def test_no_third_engine_dies_of_a_request(lab: Lab) -> None:
    await lab.add("w2")
    for name, engine in lab.engines.items():
        engine.script = lab.speaking(name, 0, EngineGoneError(f"{name} died"))
    with pytest.raises(GenerationError, match=r"w\d died; it is engine number 2"):
        await lab.ask()
    assert len(lab.asked) == 2


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
        lab.fleet.check_available = lambda: nobody() if lab.asked else None
        with pytest.raises(GracefulHTTPError) as caught:
            await lab.ask()
        del caught
    else:
        if how == "engine died":
            lab.disturb(5, GONE)
        assert text(await lab.ask()) == ANSWER
    assert len(lab.prompts) == 1
    await until(lambda: lab.prompts[0]() is None)


def nobody() -> None:
    raise NoWorkerError("no worker is available")


async def test_no_worker_at_all_is_told_as_such(lab: Lab) -> None:
    lab.fleet.check_available = nobody
    with pytest.raises(GracefulHTTPError, match="no worker is available"):
        await lab.ask()

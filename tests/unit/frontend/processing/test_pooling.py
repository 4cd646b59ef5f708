"""Pooling requests through vLLM's own app to workers over real sockets. Engines are scripted."""

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from vllm import AsyncEngineArgs
from vllm.config import PoolerConfig
from vllm.entrypoints.pooling import utils as encoders
from vllm.entrypoints.pooling.classify.serving import ServingClassification
from vllm.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput

from backend_worker.engine.vllm_engine import Items
from common.errors import EngineGoneError, MediaMissingError, OverloadedError
from common.identity import MmHash
from common.request_plane.card import WorkerCard
from common.request_plane.protocol import Submit
from common.vllm_compat.engine_settings import model_settings
from frontend.args import parse
from frontend.asgi import Door, Step
from frontend.fetch.connector import CONNECTOR_NAME, register
from frontend.fetch.loader import MediaLoader
from frontend.gate import BodyGate
from frontend.http.limits.admission import Admission
from frontend.http.server import pooling as pooling_limits
from frontend.http.server.pooling import (
    RENDERED_AT_ONCE,
    PooledTokens,
    PoolingLimits,
    _limited,
    _rows,
    inputs_of,
    limit_pooling,
)
from frontend.http.server.vllm_server import build_vllm_app
from frontend.http.settings import HttpSettings
from frontend.http.streaming.whole_answers import DeferredParts, send_deferred_parts
from frontend.media_limits.policy import FetchPolicy
from frontend.processing.preprocessor import Preprocessor
from frontend.processing.settings import PreprocessSettings
from frontend.processing.tokenizing import AT_ONCE
from frontend.request import state
from frontend.request.call_gate import batch_of_request
from frontend.request.engine_client import RoutedEngineClient
from frontend.request.settings import FaultSettings
from frontend.request_context import begin, current_context
from tests.by_version import since_033
from tests.fakes.engine import output, pooled
from tests.fakes.request_lab import Lab, Script
from tests.pictures import data_uri, picture
from tests.unit.frontend.http.asking import asking
from tests.waiting import until

EMBEDS = ("embed", "token_embed")
SHOWN = {"type": "image_url", "image_url": {"url": data_uri(picture("pooled"))}}

HEARD = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}

# vLLM's own code is run, which uses what it has deprecated.
pytestmark = pytest.mark.filterwarnings("default")


class Pooling:
    """A frontend of a model that embeds, over two workers."""

    def __init__(self, lab: Lab, preprocessor: Preprocessor, most_calls: int) -> None:
        self.lab = lab
        self.preprocessor = preprocessor
        self.asked: list[tuple[str, Submit, Items]] = []
        vars(lab)["process"] = preprocessor.process
        fleet: Any = lab.fleet
        self.client = RoutedEngineClient(preprocessor, fleet, lab.router, lab.runner, most_calls)

    async def serve(self, settings: HttpSettings) -> None:
        args = parse([]).serve
        args.model, args.served_model_name = self.preprocessor.model_config.model, ["demo"]
        server = uvicorn.Server(uvicorn.Config(lambda: None))
        self.app: FastAPI = await build_vllm_app(self.client, args, self.preprocessor.tasks, server)
        limits = PoolingLimits(settings, several_keys=False)
        limit_pooling(self.app, limits, self.preprocessor.tokenizing)
        self.preprocessor.hf_runs.reset()
        steps: list[Step] = [
            Admission(settings),
            BodyGate(settings.max_choices),
            send_deferred_parts,
        ]
        self.door = Door(self.app, steps)
        transport = httpx.ASGITransport(self.door)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://f", timeout=60)
        for name, engine in self.lab.engines.items():
            engine.script = self.answering(name)

    def answering(self, name: str) -> Script:
        """The tokens of a prompt are its vector."""

        async def script(submit: Submit, items: Items) -> AsyncGenerator[PoolingRequestOutput]:
            self.asked.append((name, submit, items))
            yield pooled(*vector(submit.prompt_token_ids or []))

        return script

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "demo", **body})

    async def embed(self, *inputs: str, **more: Any) -> httpx.Response:
        return await self.post("/v1/embeddings", input=list(inputs), **more)

    def tokens(self, text: str) -> list[float]:
        tokenizer = self.preprocessor.tokenizer
        assert tokenizer is not None
        return vector(tokenizer.encode(text))


def vector(tokens: list[int]) -> list[float]:
    return [float(each) for each in [*tokens, 0, 0, 0, 0][:4]]


@asynccontextmanager
async def pooling_frontend(
    card: WorkerCard,
    http: HttpSettings | None = None,
    faults: FaultSettings | None = None,
    tasks: Sequence[str] = EMBEDS,
    **flags: Any,
) -> AsyncIterator[Pooling]:
    made = AsyncEngineArgs(
        model=card.model.model,
        runner="pooling",
        convert="embed",
        dtype="float32",
        max_model_len=4096,
        limit_mm_per_prompt={"image": 2},
        **flags,
    )
    settings = model_settings(made.create_model_config())
    card = card.model_copy(update={"model": settings, "supported_tasks": list(tasks)})
    loader = MediaLoader(FetchPolicy(), 1 << 26)
    register(loader)
    preprocessor = Preprocessor(
        card, parse([]).serve, loader=loader, arena=None, settings=PreprocessSettings()
    )
    lab = Lab(faults or FaultSettings())
    await lab.add("w0")
    await lab.add("w1")
    http = http or HttpSettings()
    pooling = Pooling(lab, preprocessor, http.max_inflight)
    await pooling.serve(http)
    try:
        yield pooling
    finally:
        await pooling.http.aclose()
        await lab.close()
        await preprocessor.close()
        await loader.close()


@pytest.fixture(autouse=True)
def as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    monkeypatch.setattr(Request, "json", Request.json)  # put back afterwards


@pytest_asyncio.fixture
async def pooling(card: WorkerCard) -> AsyncIterator[Pooling]:
    async with pooling_frontend(card) as pooling:
        yield pooling


async def test_each_input_gets_its_own_vector(pooling: Pooling) -> None:
    answer = await pooling.embed("one of them", "and another one")
    body = answer.json()
    assert [each["embedding"] for each in body["data"]] == [
        pooling.tokens("one of them"), pooling.tokens("and another one")
    ]  # fmt: skip
    lengths = [len(submit.prompt_token_ids or ()) for _, submit, _ in pooling.asked]
    assert body["usage"]["prompt_tokens"] == sum(lengths)
    for _, submit, _ in pooling.asked:
        assert submit.sampling_params is None and submit.pooling_params is not None
        assert submit.pooling_params.task == "embed"


@pytest.mark.parametrize(
    ("path", "key"), [("/v1/embeddings", "embedding"), ("/pooling", "data"), ("/v2/embed", "")]
)
async def test_many_numbers_are_the_same_and_need_no_thread_that_others_need(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch, path: str, key: str
) -> None:
    asked: dict[str, Any] = {"input": ["one", "two three"]} if key else {"texts": ["one", "two"]}
    few = await pooling.post(path, **asked)
    monkeypatch.setattr("frontend.http.server.pooling.MANY_NUMBERS", 3)
    monkeypatch.setattr("frontend.http.server.pooling.NUMBERS_AT_ONCE", 1)
    many = await pooling.post(path, **asked)
    assert "content-length" in few.headers and "content-length" not in many.headers
    if key:
        first, second = few.json()["data"], many.json()["data"]
        assert [each[key] for each in first] == [each[key] for each in second]
        assert set(few.json()) == set(many.json())
    else:
        assert few.json()["embeddings"] == many.json()["embeddings"]


@pytest.mark.parametrize("endianness", ["native", "big"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_many_numbers_in_base64_are_written_in_pieces(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch, path: str, kind: str, endianness: str
) -> None:
    asked = {"input": ["one", "two three"], "embed_dtype": kind, "endianness": endianness}
    asked["encoding_format"] = "base64"
    few = await pooling.post(path, **asked)
    monkeypatch.setattr(pooling_limits, "MANY_NUMBERS", 3)
    monkeypatch.setattr(pooling_limits, "BASE64_AT_ONCE", 3)
    many = await pooling.post(path, **asked)
    assert few.status_code == 200, few.text
    assert "content-length" in few.headers and "content-length" not in many.headers
    assert few.json()["data"] == many.json()["data"]
    assert few.json().keys() == many.json().keys()


async def test_an_answer_in_bytes_leaves_memory_once_it_is_sent(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, sent = encoders.encode_pooling_bytes, list[weakref.ref[Any]]()

    class Sent(list[bytes]):
        pass

    def encoded(**options: Any) -> tuple[Sent, Any]:
        made, items = encode(**options)
        sent.append(weakref.ref(kept := Sent(made)))
        return kept, items

    monkeypatch.setattr(encoders, encode.__name__, encoded)
    gc.disable()
    try:
        reply = await pooling.embed("one", "two three", encoding_format="bytes")
        assert [each() for each in sent] == [None]
    finally:
        gc.enable()
    spans = [(each["start"], each["end"]) for each in json.loads(reply.headers["metadata"])["data"]]
    numbers = [np.frombuffer(reply.content[start:end], "f4") for start, end in spans]
    plain = (await pooling.embed("one", "two three")).json()["data"]
    assert [each.tolist() for each in numbers] == [
        pytest.approx(each["embedding"]) for each in plain
    ]
    assert "content-length" not in reply.headers
    assert reply.headers["content-type"] == "application/octet-stream"


async def test_a_few_inputs_of_a_request_are_rendered_at_once(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = pooling.preprocessor.renderer
    render, running, most = renderer.render_chat_async, 0, 0

    async def counting(*args: Any, **options: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await render(*args, **options)
        finally:
            running -= 1

    monkeypatch.setattr(renderer, "render_chat_async", counting)
    images = [data_uri(picture(f"rendered-{n}", (32, 32))) for n in range(20)]
    reply = await pooling.post("/v2/embed", images=images)
    assert reply.status_code == 200, reply.text
    assert most == RENDERED_AT_ONCE


async def test_texts_to_score_leave_turns_to_those_of_other_clients(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: Any = pooling.preprocessor.renderer._executor
    submit, release, submitted, cut = texts.submit, threading.Event(), [], list[str]()

    def noted(*args: Any) -> Any:
        submitted.append(args)
        return submit(*args)

    def cut_each(_: Any, some: Sequence[str], __: int) -> Sequence[str]:
        cut.extend(some)
        return some

    async def ask(host: str) -> None:
        transport = httpx.ASGITransport(pooling.door, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://f") as client:
            body = {"model": "demo", "queries": host, "documents": [host]}
            assert (await client.post("/score", json=body)).status_code == 200

    monkeypatch.setattr("frontend.http.server.pooling._cut_each", cut_each)
    submit(release.wait)
    monkeypatch.setattr(texts, "submit", noted)
    all_asked = asyncio.gather(*map(ask, [*["many"] * 10, "other"]))
    try:
        await until(lambda: len(submitted) > AT_ONCE)
    finally:
        release.set()
    await all_asked
    assert cut.index("other") == AT_ONCE


async def test_other_types_of_too_many_numbers_are_refused(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.http.server.pooling.MANY_NUMBERS", 3)
    monkeypatch.setattr("frontend.http.server.pooling.MAX_MIXED_NUMBERS", 7)
    asked = {"texts": ["one", "two"], "embedding_types": ["float", "base64"]}
    reply = await pooling.post("/v2/embed", **asked)
    assert reply.status_code == 400 and "ask for one type" in reply.text
    for types in (["base64"], ["float"]):
        reply = await pooling.post("/v2/embed", **asked | {"embedding_types": types})
        assert reply.status_code == 200


def test_classes_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.http.server.pooling.NUMBERS_AT_ONCE", 2)
    plain: Any = object.__new__(ServingClassification)
    labels = {0: "é", 4: '"two"'}
    plain.model_config = SimpleNamespace(hf_config=SimpleNamespace(id2label=labels))
    unused: Any = None
    ours: Any = _limited(plain, PoolingLimits(HttpSettings(), several_keys=False), unused)
    batch = [
        SimpleNamespace(outputs=PoolingOutput(data), prompt_token_ids=[1])
        for data in (torch.rand(5), torch.tensor([0.0, 0, 0, 1, 2]), torch.ones(5).bfloat16())
    ]

    def answer(serving: Any) -> bytes:
        ctx = SimpleNamespace(
            final_res_batch=batch, request_id="r", created_time=1, model_name="m", response=None
        )
        ctx.request = SimpleNamespace()
        return bytes(serving._build_response(ctx).body)

    with asking():
        current_context().put(parts := DeferredParts())
        assert answer(ours) == answer(plain) and not parts
        monkeypatch.setattr("frontend.http.server.pooling.MANY_NUMBERS", 3)
        body = answer(ours)
        assert parts and b"".join(parts.spliced(body)) == answer(plain)


@pytest.mark.parametrize(
    "shape", [(4,), (1, 4), (3, 4), (5000, 2), (0, 4)], ids=lambda shape: "x".join(map(str, shape))
)
def test_numbers_are_written_as_lists(shape: tuple[int, ...]) -> None:
    data = torch.rand(shape)
    assert json.loads(b"".join(_rows(data))) == data.tolist()


async def test_scores_and_ranks(pooling: Pooling) -> None:
    for prefix in ("", "/v1"):
        answer = await pooling.post(f"{prefix}/score", queries="alike", documents=["alike", "no"])
        scores = [each["score"] for each in answer.json()["data"]]
        assert scores[0] == pytest.approx(1.0) and scores[1] < 1.0
    for prefix in ("", "/v1", "/v2"):
        answer = await pooling.post(f"{prefix}/rerank", query="alike", documents=["no", "alike"])
        ranked = [each["index"] for each in answer.json()["results"]]
        assert ranked == [1, 0]


async def test_what_a_model_is_not_for_is_a_404_that_says_for_what(
    pooling: Pooling,
) -> None:
    message = {"role": "user", "content": "hello"}
    bodies: dict[str, dict[str, Any]] = {
        "/classify": {"input": "hello"},
        "/v1/completions": {"prompt": "hello"},
        "/v1/chat/completions": {"messages": [message]},
    }
    for path, body in bodies.items():
        answer = await pooling.post(path, **body)
        assert answer.status_code == 404
        assert "which is for embeddings (/v1/embeddings)" in answer.json()["error"]["message"]
    assert pooling.asked == []


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/pooling", {"input": "x", "task": "classify"}, "Unsupported task: 'classify'"),
    ("/pooling", {"input": "x", "task": "token_embed"}, "pooler-config.task token_embed"),
    ("/pooling", {"input": "x", "task": "dance"}, "task"),
    ("/pooling", {"input": "x", "task": "score"}, "`score` task was removed"),
    ("/v1/embeddings", {"input": []}, "at least one prompt"),
    ("/v1/embeddings", {"input": "x", "dimensions": 3}, "Matryoshka"),
    ("/v1/embeddings", {"input": [1, 1 << 40]}, ""),
    ("/v1/embeddings", {"input": "x " * 5000}, "maximum"),
    ("/score", {"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "1:1, 1:N or N:N"),
    (
        "/v1/embeddings",
        {"messages": [{"role": "user", "content": [HEARD]}]},
        "audio",
    ),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": [SHOWN] * 3}]}, "At most 2"),
]


async def test_bad_input(pooling: Pooling, subtests: pytest.Subtests) -> None:
    for path, body, words in WRONG:
        with subtests.test(f"{path} {str(body)[:60]}"):
            answer = await pooling.post(path, **body)
            assert (answer.status_code, words in answer.text) == (400, True), answer.text
    assert pooling.asked == []


async def test_an_unknown_model(pooling: Pooling) -> None:
    answer = await pooling.http.post("/v1/embeddings", json={"model": "other", "input": "x"})
    assert answer.status_code == 404


@pytest.mark.parametrize("steps", ["before an answer", "while others are answered"])
async def test_a_lost_worker_goes_unnoticed(pooling: Pooling, steps: str) -> None:
    lost: list[str] = []

    async def dying(submit: Submit, items: Items) -> AsyncGenerator[PoolingRequestOutput]:
        lost.append(submit.request_id)
        if steps == "while others are answered":
            await until(lambda: bool(pooling.asked))
        raise EngineGoneError("the worker's engine died")
        yield pooled(0.0)

    pooling.lab.engines["w0"].script = dying
    texts = [f"text number {index}" for index in range(6)]
    answer = await pooling.embed(*texts)
    assert [each["embedding"] for each in answer.json()["data"]] == list(map(pooling.tokens, texts))
    assert lost


async def test_a_worker_that_generates_instead(pooling: Pooling) -> None:
    """Its answer is not one, so another worker is asked."""

    async def generating(submit: Submit, items: Items) -> AsyncGenerator[RequestOutput]:
        yield output("words", finished=True)

    pooling.lab.engines["w0"].script = generating
    for _ in range(2):
        answer = await pooling.embed("text")
        assert answer.json()["data"][0]["embedding"] == pooling.tokens("text")


async def test_a_worker_that_says_too_much(
    card: WorkerCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "MAX_POOLED_BYTES", 15)  # one answer here has 16
    async with pooling_frontend(card, faults=FaultSettings(worker_wait_s=0)) as pooling:
        answer = await pooling.embed("text")
        assert answer.status_code == 503, answer.text
        assert {name for name, _, _ in pooling.asked} == {"w0", "w1"}, "the other one was tried"


async def test_a_client_that_leaves_ends_all_of_its_inputs(pooling: Pooling) -> None:
    begin()

    async def hanging(submit: Submit, items: Items) -> AsyncGenerator[PoolingRequestOutput]:
        await asyncio.Event().wait()
        yield pooled(0.0)

    engines = pooling.lab.engines.values()
    for engine in engines:
        engine.script = hanging
    left = asyncio.Event()
    body = json.dumps({"model": "demo", "input": ["a", "b", "c"]}).encode()
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http", "method": "POST", "path": "/v1/embeddings", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")],
        "http_version": "1.1",
    }  # fmt: skip
    serving = asyncio.create_task(pooling.door(scope, receive, send))
    await until(lambda: sum(engine.running for engine in engines) == 3)
    left.set()
    await until(lambda: sum(engine.aborted for engine in engines) == 3)
    await asyncio.wait([serving])


async def test_media_are_processed_here_and_sent_once(pooling: Pooling) -> None:
    conversation = [{"role": "user", "content": [SHOWN, {"type": "text", "text": "this"}]}]
    for asked in (1, 2):
        answer = await pooling.post("/v1/embeddings", messages=conversation)
        assert answer.status_code == 200, answer.text
        assert len(pooling.asked) == asked
        _, submit, _ = pooling.asked[-1]
        assert len(submit.media) == 1
    assert pooling.preprocessor.hf_runs.total == 1
    shipped = [items for _, _, items in pooling.asked if items]
    (item,) = shipped[0].values()
    assert item["pixel_values"].data is not None


async def test_media_that_a_worker_lost_are_sent_again(pooling: Pooling) -> None:
    async def forgetful(submit: Submit, items: Items) -> AsyncGenerator[PoolingRequestOutput]:
        pooling.asked.append(("", submit, items))
        if len(pooling.asked) == 1:
            raise MediaMissingError([MmHash(submit.media[0].mm_hash)], "engine_evicted")
        yield pooled(1.0)

    for engine in pooling.lab.engines.values():
        engine.script = forgetful
    conversation = [{"role": "user", "content": [SHOWN]}]
    answer = await pooling.post("/v1/embeddings", messages=conversation)
    assert answer.status_code == 200, answer.text
    assert len(pooling.asked) == 2


async def test_scores_of_pictures(pooling: Pooling) -> None:
    answer = await pooling.post("/score", queries="alike", documents=[{"content": [SHOWN]}, "no"])
    assert answer.status_code == 200, answer.text
    assert [len(submit.media) for _, submit, _ in pooling.asked].count(1) == 1
    assert pooling.preprocessor.hf_runs.total == 1


async def test_embeddings_of_media_in_scores_are_refused(pooling: Pooling) -> None:
    shown = {"type": "image_embeds", "image_embeds": "AAAA"}
    answer = await pooling.post("/score", queries="a", documents=[{"content": [shown]}])
    assert answer.status_code == 400, answer.text


async def test_a_site_that_hangs_holds_up_nobody_else(pooling: Pooling) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x.png"
    shown = {"type": "image_url", "image_url": {"url": url}}
    hung = asyncio.create_task(
        pooling.post("/score", queries="a", documents=[{"content": [shown]}])
    )
    assert (await pooling.embed("meanwhile")).status_code == 200
    hung.cancel()
    server.close()
    await asyncio.wait([hung])


async def test_embeddings_of_each_token_are_limited_too(card: WorkerCard) -> None:
    """Up to vLLM 0.32 no route is for them alone."""
    limits = HttpSettings(max_pooling_inputs=5)
    async with pooling_frontend(card, limits, tasks=["token_embed"]) as pooling:
        answer = await pooling.embed(*"123456")
        assert answer.status_code == since_033(400, 404)
        assert ("more than the 5 of --max-pooling-inputs" in answer.text) == since_033(True, False)


async def test_one_request_has_no_more_inputs_than_allowed(card: WorkerCard) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": ["x"] * 10_000},
        "/pooling": {"input": [[1]] * 6},
        "/score": {"queries": "q", "documents": ["d"] * 5},
        "/v2/embed": {"texts": ["x"] * 6, "input_type": "search_query"},
    }
    async with pooling_frontend(card, HttpSettings(max_pooling_inputs=5)) as pooling:
        for path, body in bodies.items():
            answer = await pooling.post(path, **body)
            assert (answer.status_code, "--max-pooling-inputs" in answer.text) == (400, True)
        assert pooling.asked == []
        assert (await pooling.post("/v1/embeddings", input=[5] * 100)).status_code == 200


def held_up(pooling: Pooling) -> asyncio.Event:
    """Keep all engines from answering until the event is set."""
    going = asyncio.Event()

    async def waiting(submit: Submit, items: Items) -> AsyncGenerator[PoolingRequestOutput]:
        await going.wait()
        yield pooled(1.0)

    for engine in pooling.lab.engines.values():
        engine.script = waiting
    return going


async def test_all_requests_have_no_more_inputs_than_allowed(
    card: WorkerCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling_limits, "MAX_INPUTS", 2)
    settings = HttpSettings(max_pooling_inputs=2)
    async with pooling_frontend(card, settings) as pooling:
        going = held_up(pooling)
        engines = pooling.lab.engines.values()
        first = asyncio.create_task(pooling.embed("a", "b"))
        await until(lambda: sum(engine.running for engine in engines) == 2)
        refused = await pooling.embed("c")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        going.set()
        assert (await first).status_code == 200
        assert (await pooling.embed("c")).status_code == 200


SCORES = {
    "/score": ("queries", "documents"),
    "/v1/score": ("text_1", "text_2"),
    "/rerank": ("query", "documents"),
    "/v1/rerank": ("query", "documents"),
    "/v2/rerank": ("query", "documents"),
}
FEW_TOKENS = 2048
"""Tokens of a request, with one token for each of its possible inputs."""


@pytest.mark.parametrize("path", SCORES)
async def test_a_query_counts_with_each_of_its_documents(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("frontend.http.settings.TOKENS_AN_INPUT", 1)
    query, documents = SCORES[path]
    await pooling.serve(HttpSettings())
    few = {query: " a" * 100, documents: ["beta"] * 10}
    many = few | {documents: ["beta"] * (FEW_TOKENS // 50)}
    answer = await pooling.post(path, **many)
    assert (answer.status_code, "send several requests" in answer.text) == (400, True)
    assert pooling.asked == []
    assert (await pooling.post(path, **few)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [" a" * 1000] * 3}),
        ("/v1/embeddings", {"input": ["x"] * 3, "padding": "max_length"}),
        ("/score", {"queries": "x", "documents": [" a" * 1000] * 3}),
        ("/score", {"queries": "x", "documents": [" a" * 20_000] * 1000}),
    ],
    ids=["texts", "padded", "documents", "long documents"],
)
async def test_a_request_has_no_more_tokens_than_allowed(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr("frontend.http.settings.TOKENS_AN_INPUT", 1)
    await pooling.serve(HttpSettings())
    answer = await pooling.post(path, **body)
    assert (answer.status_code, "send several requests" in answer.text) == (400, True)
    assert pooling.asked == []


async def test_a_thousand_documents_of_500_tokens_are_scored(card: WorkerCard) -> None:
    async with pooling_frontend(card, HttpSettings(max_inflight=8)) as pooling:
        answer = await pooling.post("/rerank", query=" a" * 20, documents=[" a" * 500] * 1000)
        assert answer.status_code == 200, answer.text
        assert sum(len(submit.prompt_token_ids or ()) for _, submit, _ in pooling.asked) > 500_000


async def test_all_requests_have_no_more_tokens_than_allowed(
    card: WorkerCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.http.settings.TOKENS_AN_INPUT", 1)
    monkeypatch.setattr(pooling_limits, "LARGEST_REQUESTS", 1)
    async with pooling_frontend(card) as pooling:
        going = held_up(pooling)
        engines = pooling.lab.engines.values()
        first = asyncio.create_task(pooling.embed(" a" * 1500))
        await until(lambda: sum(engine.running for engine in engines) == 1)
        refused = await pooling.embed(" a" * 1000)
        assert refused.status_code == 429
        going.set()
        assert (await first).status_code == 200
        assert (await pooling.embed(" a" * 1000)).status_code == 200


async def test_vectors_of_tokens_are_not_multiplied_without_end(
    card: WorkerCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling_limits, "MAX_SIMILARITIES", 5000)
    async with pooling_frontend(card, tasks=["token_embed"]) as pooling:
        few, many = ({"queries": " a" * 50, "documents": [" a" * 50] * n} for n in (1, 3))
        refused = await pooling.post("/score", **many)
        assert (refused.status_code, "send fewer or shorter" in refused.text) == (400, True)
        assert pooling.asked == []
        await pooling.post("/score", **few)
        assert len(pooling.asked) == 2


async def test_a_text_longer_than_the_context_is_the_mean_of_its_chunks(card: WorkerCard) -> None:
    config = PoolerConfig(enable_chunked_processing=True, max_embed_len=10_000)
    async with pooling_frontend(card, pooler_config=config) as pooling:
        answer = await pooling.embed(" a" * 5000, "short", use_activation=False)
        assert answer.status_code == 200, answer.text
        lengths = sorted(len(submit.prompt_token_ids or ()) for _, submit, _ in pooling.asked)
        assert len(lengths) == 3 and lengths[1:] == [904, 4096]
        long, short = (each["embedding"] for each in answer.json()["data"])
        assert long == pytest.approx(pooling.tokens(" a" * 4)) and short == pooling.tokens("short")


@pytest.mark.skipif(since_033(False, True), reason="vLLM has late chunking since 0.33")
async def test_chunks_of_a_text_have_their_places(card: WorkerCard) -> None:
    """An assertion of vLLM's failed, so each such request was a 500."""
    async with pooling_frontend(card, tasks=["token_embed"]) as pooling:

        async def chunks(submit: Submit, _: Items) -> AsyncGenerator[PoolingRequestOutput]:
            made, tokens = pooled(1, 2), submit.prompt_token_ids or []
            made.outputs.data = torch.ones((-(-len(tokens) // 2), 3))
            made.prompt_token_ids = tokens
            yield made

        for engine in pooling.lab.engines.values():
            engine.script = chunks
        answer = await pooling.embed("hello world", late_chunking_params={"chunk_size": 2})
        (item,) = answer.json()["data"]
        assert len(item["late_chunking"]["chunks"]) == len(item["embedding"]) > 0
        refused = await pooling.post(
            "/v1/embeddings", input=[1, 2], late_chunking_params={"chunk_size": 2}
        )
        assert (refused.status_code, "plain-text" in refused.text) == (400, True)


async def test_outputs_that_never_fit_are_refused(card: WorkerCard) -> None:
    settings = HttpSettings(pooling_memory_mb=20 / 2**20)  # one answer here has 16 bytes
    async with pooling_frontend(card, settings) as pooling:
        texts = ["a text that is long", "another one that is long"]
        refused = await pooling.embed(*texts)
        assert (refused.status_code, "send several requests" in refused.text) == (400, True)
        for text in texts:
            assert (await pooling.embed(text)).status_code == 200


def test_answers_that_nobody_reads_hold_their_memory_only() -> None:
    """Eight requests of most inputs, whose clients read nothing, had all others answered 429."""
    limits = PoolingLimits(HttpSettings(pooling_memory_mb=1), several_keys=False)
    with ExitStack() as unread:
        for _ in range(28):
            with asking(), limits.admitted(2048) as held:
                batch_of_request().keep(1 << 15)
                unread.enter_context(held.pop_all())
        with asking(), limits.admitted(1), pytest.raises(OverloadedError, match="bytes of pooled"):
            batch_of_request().keep(1)
        with asking(key="another"), limits.admitted(1):
            batch_of_request().keep(1 << 17)
    with asking(), limits.admitted(1):
        batch_of_request().keep(7 << 17)


def test_eight_requests_of_most_inputs_and_tokens_leave_room_to_another_client() -> None:
    limits = PoolingLimits(HttpSettings(), several_keys=False)

    def ask(client: str) -> None:
        with asking(key=client):
            held.enter_context(limits.admitted(2048))
            if tokens := current_context().find(PooledTokens):
                tokens.add(tokens.most)

    with ExitStack() as held:
        for _ in range(7):
            ask("one")
        with pytest.raises(OverloadedError, match="this client has its share of inputs"):
            ask("one")
        ask("another")


@pytest.mark.parametrize("encoding", ["float", "base64", "bytes"])
async def test_an_answer_that_is_not_sent_yet_counts(card: WorkerCard, encoding: str) -> None:
    settings = HttpSettings(pooling_memory_mb=20 / 2**20)  # one answer here has 16 bytes
    async with pooling_frontend(card, settings) as pooling:
        asked = {"model": "demo", "input": "text", "encoding_format": encoding}
        begun, read = asyncio.Event(), asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(asked).encode()}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None:
            begun.set()
            await read.wait()

        head = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "query_string": b""}
        slow = pooling.door({**scope, "headers": head, "http_version": "1.1"}, receive, send)
        answered = asyncio.ensure_future(slow)
        await begun.wait()
        assert (await pooling.embed("another text")).status_code == 429
        read.set()
        await answered
        assert (await pooling.embed("another text")).status_code == 200


async def test_a_large_request_is_worked_on_in_parts(card: WorkerCard) -> None:
    async with pooling_frontend(card, HttpSettings(max_inflight=8)) as pooling:
        most = 0

        async def counted(submit: Submit, items: Items) -> AsyncGenerator[PoolingRequestOutput]:
            nonlocal most
            most = max(most, sum(each.running for each in pooling.lab.engines.values()))
            await asyncio.sleep(0)
            yield pooled(1.0)

        for engine in pooling.lab.engines.values():
            engine.script = counted
        assert (await pooling.embed(*["x"] * 40)).status_code == 200
        assert 1 <= most <= 8


async def test_a_request_that_waits_for_a_place_is_late_in_time(card: WorkerCard) -> None:
    faults = FaultSettings(request_timeout_s=0.5)
    async with pooling_frontend(card, HttpSettings(max_inflight=1), faults) as pooling:

        async def hanging(submit: Submit, items: Items) -> AsyncGenerator[PoolingRequestOutput]:
            await asyncio.Event().wait()
            yield pooled(1.0)

        for engine in pooling.lab.engines.values():
            engine.script = hanging
        answer = await pooling.embed("a", "b")
        assert (answer.status_code, "0.5 s" in answer.text) == (504, True)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"input": "text"}, 1),
        ({"input": [1, 2, 3]}, 1),
        ({"input": [[1, 2], [3]]}, 2),
        ({"input": ["a", "b", "c"]}, 3),
        ({"input": []}, 0),
        ({"messages": [{"role": "user"}] * 3}, 1),
        ({"messages": [[{"role": "user"}]] * 3}, 3),
        ({"data_1": "q", "data_2": ["a", "b"], "documents": ["a", "b"]}, 3),
        ({"query": "q", "documents": [{"content": []}] * 4}, 5),
        ({"texts": ["a"], "images": ["b", "c"], "inputs": None}, 3),
        ({"data": {"x": 1}}, 0),
    ],
)
def test_inputs_are_counted(fields: dict[str, Any], count: int) -> None:
    class Asked:
        def __init__(self) -> None:
            vars(self).update(fields)

    assert inputs_of(Asked()) == count

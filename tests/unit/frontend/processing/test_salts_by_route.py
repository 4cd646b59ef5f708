"""A salt reaches media by every route of vLLM's own app, and an adapter the engine; only that is
made up."""

import asyncio
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn
from starlette.requests import Request
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput

from common.errors import MmRouterError
from common.identity import MmHash, RequestId, WorkerId
from common.media.cache_partition import hash_within, partition_of
from common.request_plane.card import Adapter, WorkerCard
from common.transfer.arena.arena import Arena
from frontend.args import parse
from frontend.asgi import App, Door, Step, as_vllm_error
from frontend.fetch.connector import CONNECTOR_NAME, register
from frontend.fetch.loader import MediaLoader
from frontend.gate import BodyGate
from frontend.http.access.api_keys import ApiKeyGuard, Keys
from frontend.http.limits.admission import Admission
from frontend.http.server.vllm_server import build_vllm_app, share_adapters
from frontend.http.settings import HttpSettings
from frontend.media_limits.policy import FetchPolicy
from frontend.processing.preprocessor import Preprocessor, ProcessedPrompt
from frontend.processing.settings import PreprocessSettings
from frontend.request.engine_client import RoutedEngineClient
from frontend.router.selection import LoadTracker
from frontend.workers import Adapters
from tests.pictures import data_uri, picture

URL = data_uri(picture("salted"))

# vLLM's own code is run, which uses what it has deprecated.
pytestmark = pytest.mark.filterwarnings("default")


class Engine(RoutedEngineClient):
    """Says one word on every prompt, and remembers the prompt."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        router = SimpleNamespace(load=LoadTracker(time.monotonic))
        super().__init__(preprocessor, None, router, None, 1)  # type: ignore[arg-type]
        self.prompts: list[ProcessedPrompt] = []

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        pass

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            processed = await self._preprocessor.process(
                prompt, sampling_params, RequestId(request_id), lora_request
            )
        except MmRouterError as error:
            raise as_vllm_error(error) from error
        self.prompts.append(processed)
        said = CompletionOutput(0, "word", [1], None, None, finish_reason="stop")
        yield RequestOutput(request_id, None, processed.token_ids, None, [said], finished=True)


@pytest_asyncio.fixture
async def engine(
    card: WorkerCard, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Engine]:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    monkeypatch.setattr(Request, "json", Request.json)  # put back afterwards
    loader = MediaLoader(FetchPolicy(), 1 << 26)
    register(loader)
    preprocessor = Preprocessor(
        card, parse([]).serve, loader=loader, arena=arena, settings=PreprocessSettings()
    )
    yield Engine(preprocessor)
    await preprocessor.close()
    await loader.close()


@pytest_asyncio.fixture
async def app(engine: Engine) -> App:
    args: Namespace = parse(["--enable-scale-out"]).serve
    args.model, args.served_model_name = engine.model_config.model, ["demo"]
    server = uvicorn.Server(uvicorn.Config(lambda: None))
    return await build_vllm_app(engine, args, ("generate",), server)


def chat(stream: bool) -> dict[str, Any]:
    shown = {"type": "image_url", "image_url": {"url": URL}}
    message = {"role": "user", "content": [shown]}
    return {"messages": [message], "max_tokens": 2, "stream": stream}


def responses(stream: bool) -> dict[str, Any]:
    shown = {"type": "input_image", "image_url": URL, "detail": "auto"}
    message = {"role": "user", "content": [shown]}
    return {"input": [message], "max_output_tokens": 2, "stream": stream}


def messages(stream: bool) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    return {"messages": [message], "max_tokens": 2, "stream": stream}


ROUTES = (
    ("/v1/chat/completions", chat),
    ("/invocations", chat),
    ("/v1/responses", responses),
    ("/v1/messages", messages),
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_salt_reaches_media_and_blocks(
    app: App, engine: Engine, path: str, body: Callable[[bool], dict[str, Any]], stream: bool
) -> None:
    salts = (None, "one", "two", "one")
    for salt in salts:
        await ask(app, path, body(stream) | {"cache_salt": salt})
    assert [prompt.cache_salt for prompt in engine.prompts] == list(salts)
    unsalted = hashes(engine)[0]
    assert hashes(engine) == [hash_within(unsalted, partition_of(salt)) for salt in salts]


async def test_a_picture_is_processed_once_for_all_routes(app: App, engine: Engine) -> None:
    """Whatever vLLM hands to a connector for one request must not set its pictures apart."""
    runs = engine._preprocessor.hf_runs
    runs.reset()
    for path, body in ROUTES:
        await ask(app, path, body(False))
    assert len(set(hashes(engine))) == runs.total == 1


async def test_isolated_keys_share_neither_media_nor_blocks(app: App, engine: Engine) -> None:
    guard = ApiKeyGuard(Keys(["me", "you"]), isolate=True)
    for key in ("me", "you", "me"):
        await ask(app, "/v1/chat/completions", chat(True), key, guard)
    for found in (hashes(engine), [prompt.cache_salt for prompt in engine.prompts]):
        assert found[0] == found[2] != found[1]


async def test_tokens_with_media_are_salted_too(app: App, engine: Engine) -> None:
    await ask(app, "/v1/chat/completions", chat(False))
    text = engine.renderer.get_mm_processor().dummy_inputs.get_dummy_text({"image": 1})
    tokens = engine.renderer.get_tokenizer().encode(text)
    body = {
        "token_ids": tokens,
        "content_parts": [{"type": "image_url", "url": URL}],
        "sampling_params": {"max_tokens": 2},
        "cache_salt": "one",
    }
    await ask(app, "/inference/v1/generate", body)
    unsalted, salted = hashes(engine)
    assert salted == hash_within(unsalted, partition_of("one"))
    assert engine.prompts[1].cache_salt == "one"


async def test_a_hash_that_a_client_sends_finds_nothing(app: App, engine: Engine) -> None:
    await ask(app, "/v1/chat/completions", chat(False))
    (medium,) = engine.prompts[0].media
    part = medium.part
    body = {
        "token_ids": engine.prompts[0].token_ids,
        "features": {
            "mm_hashes": {"image": [part.mm_hash]},
            "mm_placeholders": {"image": [{"offset": part.offset, "length": part.length}]},
        },
        "sampling_params": {"max_tokens": 2},
    }
    reply = await post(app, "/inference/v1/generate", body)
    assert reply.status_code == 400
    assert "image 1 is only named by a hash" in reply.text


async def test_an_adapter_is_asked_for_by_every_route(app: App, engine: Engine) -> None:
    adapters = Adapters()
    share_adapters(app, adapters)  # type: ignore[arg-type]
    story = Adapter(name="story", path="/s")
    adapters.changed(WorkerId("a"), [story])
    engine._preprocessor.hf_runs.reset()
    for path, body in ROUTES:
        for model in ("story", "demo"):
            reply = await post(app, path, body(False), model=model)
            assert reply.status_code == 200, reply.text
    asked = [prompt.lora_request for prompt in engine.prompts]
    assert [one and (one.lora_name, one.lora_path) for one in asked] == [
        ("story", "/s"),
        None,
    ] * len(ROUTES)
    assert len(set(hashes(engine))) == engine._preprocessor.hf_runs.total == 1
    adapters.left(WorkerId("a"))
    for path, body in ROUTES:
        reply = await post(app, path, body(True), model="story")
        assert reply.status_code == 404, reply.text


def hashes(engine: Engine) -> list[MmHash]:
    return [medium.part.mm_hash for prompt in engine.prompts for medium in prompt.media]


async def ask(app: App, path: str, body: dict[str, Any], key: str = "", *steps: Step) -> None:
    reply = await post(app, path, body, key, steps=steps)
    assert reply.status_code == 200, reply.text
    assert "word" in reply.text or "token_ids" in reply.text


async def post(
    app: App,
    path: str,
    body: dict[str, Any],
    key: str = "",
    model: str = "demo",
    steps: Sequence[Step] = (),
) -> httpx.Response:
    steps = [*steps, Admission(HttpSettings()), BodyGate(max_choices=16)]
    transport = httpx.ASGITransport(Door(app, steps))
    # By /invocations the body's model counts for nothing, in vLLM.
    headers = {
        "Authorization": f"Bearer {key}",
        "X-Amzn-SageMaker-Adapter-Identifier": model,
    }
    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as http,
    ):
        return await http.post(path, json=body | {"model": model})

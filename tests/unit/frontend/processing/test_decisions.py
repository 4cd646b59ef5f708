"""Decisions, and their pictures, of which vLLM makes chats with decoded ones (``image_pil``)."""

import asyncio
import threading
from argparse import Namespace
from collections.abc import AsyncIterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI
from vllm.renderers import ChatParams, TokenizeParams

from common.request_plane.card import WorkerCard
from common.transfer.arena.arena import Arena
from frontend.fetch.connector import CONNECTOR_NAME, register
from frontend.fetch.content import DeferredMedium
from frontend.fetch.loader import MediaLoader
from frontend.http.limits import content_parts
from frontend.http.server.serving_threads import tokenize_decisions_aside
from frontend.http.server.vllm_server import decode_for_decisions
from frontend.media_limits.policy import FetchPolicy
from frontend.processing.preprocessor import Preprocessor
from frontend.processing.settings import PreprocessSettings
from tests.by_version import since_033
from tests.pictures import data_uri, picture
from tests.unit.frontend.http.asking import asking

MODULE = since_033(
    "vllm.entrypoints.openai.decisions.strategies",
    "vllm.entrypoints.generate.structured_decisions.strategies",
)


@pytest_asyncio.fixture
async def preprocessor(
    card: WorkerCard, serve_args: Namespace, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Preprocessor]:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    loader = MediaLoader(FetchPolicy(), 1 << 26)
    register(loader)
    made = Preprocessor(card, serve_args, loader=loader, arena=arena, settings=PreprocessSettings())
    yield made
    await made.close()
    await loader.close()


def deciding(preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Return vLLM's strategy of that name, in an app."""
    strategy = object.__new__(getattr(pytest.importorskip(MODULE), name))
    strategy.modalities = frozenset({"image"})  # from 0.33 on set where it is made
    strategy.context = SimpleNamespace(engine_client=preprocessor)
    app = FastAPI()
    app.state.decisions = SimpleNamespace(strategy=strategy)
    app.state.other = None
    decode_for_decisions(app)
    module, reader = content_parts.reader_of_parts()
    monkeypatch.setattr(module, reader, content_parts.parse)
    return strategy


async def rendered(preprocessor: Preprocessor, parts: list[Any], question: str) -> Any:
    """Return the prompt of a question about pictures."""
    _, (prompt,) = await preprocessor.renderer.render_chat_async(
        [[{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]],
        ChatParams(),
        TokenizeParams(max_total_tokens=4096, add_special_tokens=False),
        prompt_extras={},
    )
    return prompt


async def test_pictures_are_decoded_as_they_are_fetched_and_taken(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were a 500, since vLLM asks for their size, or a 400, since no client may send them. It
    shrank them on the event loop: eight of 64 megapixels stopped a frontend for 3.8 s.
    """
    module, threads = pytest.importorskip(MODULE), set()

    def shrink(image: Any, max_pixels: int, real: Any = module.cap_pixels) -> Any:
        threads.add(threading.current_thread())
        return real(image, max_pixels)

    monkeypatch.setattr(module, "cap_pixels", shrink)
    strategy = deciding(preprocessor, monkeypatch, "LiquidStrategy")
    with asking():
        parts: list[Any] = await strategy._image_parts([data_uri(picture("decided", (1400, 900)))])
        assert parts[0]["image_pil"].size == (1277, 821)
        assert threads and threading.current_thread() not in threads
        prompt = await rendered(preprocessor, parts, "What?")
    assert len(prompt["mm_kwargs"]["image"]) == 1


async def test_questions_share_a_picture_that_is_not_decoded(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 questions each hashed four decoded pictures of 75 MB; others' waited for 12 s."""
    strategy = deciding(preprocessor, monkeypatch, "NextTokenStrategy")
    with asking():
        parts = await strategy._image_parts([data_uri(picture("asked about"))])
        assert isinstance(parts[0]["image_pil"], DeferredMedium)
        for question in ("What?", "Why?"):
            prompt = await rendered(preprocessor, parts, question)
            assert len(prompt["mm_kwargs"]["image"]) == 1


class _Tokenizer:
    """Has a token for each character, and notes in which threads it is asked."""

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def encode(self, text: str, **_: Any) -> list[int]:
        self.threads.add(threading.current_thread())
        return list(map(ord, text))

    def apply_chat_template(self, chat: Any, **_: Any) -> str:
        content = chat[1]["content"]
        parts = content if isinstance(content, list) else [{"text": content}]
        return "".join(part.get("text", "<|vision_end|>") for part in parts)


class _Engine:
    """Answers with as many probabilities as are asked for."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def encode(self, prompt: Any, params: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.prompts.append(prompt["prompt_token_ids"])
        data = SimpleNamespace(tolist=lambda: [0.5, 0.5])
        yield SimpleNamespace(outputs=SimpleNamespace(data=data), error=None)


@pytest.mark.parametrize("name", ["JointSchemaStrategy", "D3Strategy"])
async def test_what_models_decide_on_is_tokenized_in_a_thread(name: str) -> None:
    module = pytest.importorskip(MODULE)
    if not hasattr(module, name):
        pytest.skip("this vLLM has none")
    kinds = import_module(MODULE.replace("strategies", "question_types"))
    strategy = object.__new__(getattr(module, name))
    tokenizer, engine = _Tokenizer(), _Engine()
    strategy.tokenizer, strategy.context = tokenizer, SimpleNamespace(engine_client=engine)
    strategy.prefix, strategy.suffix, strategy.max_length = [1], [2], 1 << 20
    strategy.codes, strategy.temperature, strategy.max_model_len = ["A", "B"], 1.0, 1 << 20
    option = kinds.Option
    question = kinds.Question(
        "q", kinds.QUESTION_TYPES["noul"], "?", (option("yes"), option("no")), ()
    )
    asked: Any = ([question], None, "state " * 1000)
    expected = await strategy.read(
        *asked, request_id="r", lora_request=None, priority=0, chat_template_kwargs=None
    )
    tokenizer.threads.clear()
    app = FastAPI()
    app.state.one = app.state.other = SimpleNamespace(strategy=strategy)
    tokenizing: Any = SimpleNamespace(aside=asyncio.to_thread, check_length=lambda *_: None)
    tokenize_decisions_aside(app, tokenizing)
    assert (
        await strategy.read(
            *asked, request_id="r", lora_request=None, priority=0, chat_template_kwargs=None
        )
        == expected
    )
    assert engine.prompts[0] == engine.prompts[1]
    assert threading.current_thread() not in tokenizer.threads

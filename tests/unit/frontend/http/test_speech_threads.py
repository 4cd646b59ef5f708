"""Speech that keeps a thread, or that has no language, fails its request alone."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration

from common.errors import ThreadStuckError
from common.observability.watchdog import WATCHDOG
from frontend.http.server.serving_threads import watch_speech
from tests.fakes.hanging import Hanging
from tests.waiting import until


@pytest.mark.parametrize("route", ["transcription", "translation"])
async def test_it_fails_alone(route: str) -> None:
    stuck = WATCHDOG.stuck
    with Hanging(lambda data: ([data], 1.0)) as decode:
        serving: Any = SimpleNamespace(
            _preprocess_executor=ThreadPoolExecutor(1), _decode_and_chunk_speech=decode
        )
        app = FastAPI()
        setattr(app.state, f"openai_serving_{route}", serving)
        watch_speech(app, 1.0)
        failed = await asyncio.gather(
            *(serving._decode_and_chunk_speech_async(b"bad") for _ in range(5)),
            return_exceptions=True,
        )
        assert [type(each) for each in failed] == [ThreadStuckError] * 5
        assert "speech thread" in str(failed[0])
        decode.hangs = False
        assert await serving._decode_and_chunk_speech_async(b"good") == ([b"good"], 1.0)
    await until(lambda: WATCHDOG.stuck == stuck)
    serving._preprocess_executor.shutdown()


class _Words:
    """A tokenizer that has some tokens."""

    unk_token_id = 0

    def __init__(self, unknown: int | None, *words: str) -> None:
        self._unknown, self._words = unknown, words

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._words.index(token) + 1 if token in self._words else self._unknown


LANGUAGES = [f"<|{code}|>" for code in WhisperForConditionalGeneration.supported_languages]


@pytest.mark.parametrize(
    ("tokenizer", "detects"),
    [
        (_Words(0, *LANGUAGES), True),
        (_Words(0, "<|en|>"), False),
        (_Words(None, *LANGUAGES[1:]), False),
    ],
)
async def test_a_language_that_can_not_be_detected_must_be_named(
    tokenizer: _Words, detects: bool
) -> None:
    async def detect(audio: object, request_id: str) -> str:
        return "en"

    serving: Any = SimpleNamespace(
        _preprocess_executor=ThreadPoolExecutor(1),
        _decode_and_chunk_speech=None,
        _detect_language=detect,
        model_cls=WhisperForConditionalGeneration,
        tokenizer=tokenizer,
    )
    app = FastAPI()
    app.state.openai_serving_transcription = serving
    watch_speech(app, 1.0)
    if detects:
        assert await serving._detect_language(None, "1") == "en"
    else:
        with pytest.raises(VLLMValidationError, match="set language to its ISO 639-1 code"):
            await serving._detect_language(None, "1")
    serving._preprocess_executor.shutdown()

"""Speech that a thread does not come back from fails its request alone."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

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

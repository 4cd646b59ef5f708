"""Speech counts as media do. Some that keeps a thread, or has no language, fails alone."""

import asyncio
import gc
import io
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import soundfile  # type: ignore[import-untyped] # it has no types
from fastapi import FastAPI
from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration
from vllm.multimodal.media.audio import load_audio_soundfile
from vllm.multimodal.processing import cached_encode
from vllm.tokenizers import TokenizerLike

from common.errors import ThreadStuckError
from common.observability.watchdog import WATCHDOG
from frontend.fetch import MediaLoader
from frontend.http.server.serving_threads import limit_speech, prompt_speech_aside
from frontend.media_limits import FetchPolicy
from tests.clips import sound
from tests.fakes.hanging import Hanging
from tests.waiting import until


@dataclass
class Decodes:
    """How sounds are decoded, in the place of a model's settings; ``sizes`` are those that were."""

    by: Callable[[bytes], object] | None = None
    sizes: list[int] = field(default_factory=list)


@dataclass
class Speech:
    """A serving object of vLLM's with what it needs to decode."""

    loader: MediaLoader
    asr_config: Decodes = field(default_factory=Decodes)
    max_audio_decode_bytes: int = 1 << 30
    max_audio_decode_duration_s: float = 600.0
    model_cls: type = object
    tokenizer: object = None
    _decode_and_chunk_speech_async: Any = None
    _preprocess_executor: Executor = field(default_factory=partial(ThreadPoolExecutor, 1))

    def _decode_and_chunk_speech(self, data: bytes) -> object:
        if self.asr_config.by is not None:
            return self.asr_config.by(data)
        self.asr_config.sizes.append(len(data))
        most = self.max_audio_decode_bytes
        # By another reader vLLM logs an error, which pytest keeps with frames and samples.
        samples, rate = load_audio_soundfile(io.BytesIO(data), sr=16_000, max_decode_bytes=most)
        return [samples[:9], samples[9:]], len(samples) / rate

    async def _detect_language(self, audio: object, request_id: str) -> str:
        return "en"


MakeSpeech = Callable[..., Speech]


@pytest.fixture
async def make_speech() -> AsyncIterator[MakeSpeech]:
    """Serving objects whose speech is limited by a policy."""
    async with AsyncExitStack() as made:

        def make(route: str = "transcription", **of: Any) -> Speech:
            limits = {name: of.pop(name) for name in FetchPolicy.model_fields if name in of}
            speech = Speech(MediaLoader(FetchPolicy(**limits), 0), **of)
            made.push_async_callback(speech.loader.close)
            app = FastAPI()
            setattr(app.state, f"openai_serving_{route}", speech)
            limit_speech(app, speech.loader)
            made.callback(speech._preprocess_executor.shutdown)
            return speech

        yield make


@pytest.mark.parametrize("route", ["transcription", "translation"])
async def test_it_fails_alone(route: str, make_speech: MakeSpeech) -> None:
    stuck = WATCHDOG.stuck
    with Hanging(lambda data: ([np.zeros(1)], 1.0)) as decode:
        speech = make_speech(route, asr_config=Decodes(decode), decode_timeout_s=1.0)
        failed = await asyncio.gather(
            *(speech._decode_and_chunk_speech_async(sound("bad", 0.1)) for _ in range(5)),
            return_exceptions=True,
        )
        assert [type(each) for each in failed] == [ThreadStuckError] * 5
        assert "speech thread" in str(failed[0])
        decode.hangs = False
        assert await speech._decode_and_chunk_speech_async(sound("good")) == ([0.0], 1.0)
    await until(lambda: WATCHDOG.stuck == stuck)


def silence(channels: int, seconds: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros((seconds * 48_000, channels)), 48_000, format="FLAC")
    return buffer.getvalue()


async def test_it_counts_before_it_is_decoded(make_speech: MakeSpeech) -> None:
    speech = make_speech(max_request_megapixels=8)
    bomb = silence(8, 10)
    assert len(bomb) < 20_000
    with pytest.raises(VLLMValidationError, match="may have 8 megapixels together"):
        await speech._decode_and_chunk_speech_async(bomb)
    with pytest.raises(VLLMValidationError, match="from the file: it begins like none"):
        await speech._decode_and_chunk_speech_async(b"no sound")
    assert not speech.asr_config.sizes
    pieces, seconds = await speech._decode_and_chunk_speech_async(silence(1, 10))
    assert (len(pieces[1]), seconds) == (159_991, 10.0)


async def test_it_takes_room_as_long_as_a_piece_of_it_is_about(make_speech: MakeSpeech) -> None:
    speech = make_speech(decoding_megapixels=8)
    pieces, _ = await speech._decode_and_chunk_speech_async(silence(2, 10))
    assert speech.loader.budgets.decoding.reserved == 2 * 5 * 480_000
    with pytest.raises(GracefulHTTPError, match="8 megapixels for decoded media"):
        await speech._decode_and_chunk_speech_async(silence(2, 10))
    last = pieces.pop()
    del pieces
    gc.collect()
    assert speech.loader.budgets.decoding.reserved == 2 * 5 * 480_000
    assert len(last) == 159_991
    del last
    await until(lambda: speech.loader.budgets.decoding.reserved == 0)


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
    tokenizer: _Words, detects: bool, make_speech: MakeSpeech
) -> None:
    speech = make_speech(model_cls=WhisperForConditionalGeneration, tokenizer=tokenizer)
    if detects:
        assert await speech._detect_language(None, "1") == "en"
    else:
        with pytest.raises(VLLMValidationError, match="set language to its ISO 639-1 code"):
            await speech._detect_language(None, "1")


class _Letters:
    """A tokenizer."""

    def encode(self, text: str, **_: object) -> list[int]:
        return [*map(ord, text)]


class _Writer(SpeechToTextBaseServing):
    """Serving whose model makes prompts by itself."""

    model_config: Any = SimpleNamespace(is_encoder_decoder=False)
    asr_config: Any = SimpleNamespace(sample_rate=10)
    task_type: Any = "transcribe"

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.model_cls: Any = SimpleNamespace(
            validate_language=lambda code: code, get_generation_prompt=self._prompt
        )
        self.renderer: Any = SimpleNamespace(render_cmpl_async=self._rendered)
        self._decode_and_chunk_speech_async: Any = self._decoded

    async def _decoded(self, _: bytes) -> Any:
        return [np.zeros(5), np.ones(20)], 2.5

    def _prompt(self, asked: Any) -> Any:
        self.threads.append(threading.current_thread())
        cached_encode(cast(TokenizerLike, _Letters()), "a prompt")  # as Qwen3-ASR does
        return {"prompt_token_ids": [len(asked.audio)], "multi_modal_data": {"audio": asked.audio}}

    async def _rendered(self, prompts: list[Any]) -> list[Any]:
        return [prompt["prompt_token_ids"] for prompt in prompts]


async def test_a_prompt_of_speech_keeps_no_event_loop() -> None:
    """400 KB of ``<asr_te`` stopped it for 21 s, and the frontend dropped its workers."""
    serving, app = _Writer(), FastAPI()
    app.state.openai_serving_transcription = serving
    tokenizing: Any = SimpleNamespace(aside=asyncio.to_thread, check_length=lambda *_: None)
    prompt_speech_aside(app, tokenizing)
    for prompt in ("<asr_te" * 50_000, "Words of <b>HTML</b>."):
        request: Any = SimpleNamespace(
            language="en",
            to_language=None,
            prompt=prompt,
            response_format="json",
            build_stt_params=lambda **given: SimpleNamespace(**given),
        )
        made = serving._preprocess_speech_to_text(request, b"", "r")
        if prompt.startswith("<asr"):
            with pytest.raises(VLLMValidationError, match="too many `<`"):
                await made
        else:
            assert await made == ([[5], [20]], 2.5, [0.0, 0.5])
    assert len(serving.threads) == 2
    assert threading.main_thread() not in serving.threads
    assert not cached_encode.cache_info().currsize, "2,048 prompts would stay, of up to 20 MB each"

"""Replace the threads in which vLLM decodes speech for transcriptions, which nobody watches."""

from typing import Final

from fastapi import FastAPI
from vllm import envs
from vllm.utils.async_utils import make_async

from common.aio.watched_threads import WatchedThreads

_SERVINGS: Final = ("openai_serving_transcription", "openai_serving_translation")


def watch_speech(app: FastAPI, limit_s: float) -> None:
    """Let speech be decoded in threads that are replaced if they do not return.

    Args:
        limit_s: seconds that one file may take.
    """
    for name in _SERVINGS:
        if (serving := getattr(app.state, name, None)) is None:
            continue
        serving._preprocess_executor.shutdown(wait=False)
        threads = WatchedThreads("speech", envs.VLLM_MAX_AUDIO_PREPROCESS_WORKERS, limit_s)
        serving._preprocess_executor = threads
        decode = make_async(serving._decode_and_chunk_speech, executor=threads)
        serving._decode_and_chunk_speech_async = decode

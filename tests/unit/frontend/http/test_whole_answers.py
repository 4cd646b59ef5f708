"""Whole answers with many log probabilities are made in a thread, and are the same."""

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.http.streaming.whole_answers import MANY, made_aside


async def given(*outputs: Any, error: BaseException | None = None) -> AsyncIterator[Any]:
    for each in outputs:
        yield each
    if error is not None:
        raise error


def an_output(logprobs: int) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[{}] * logprobs or None)])


async def make(outputs: AsyncIterator[Any]) -> Any:
    """As vLLM's method begins."""
    last = None
    try:
        async for output in outputs:
            last = output
    except asyncio.CancelledError:
        return "client disconnected"
    return last, threading.current_thread()


@pytest.mark.parametrize("size", [0, MANY, MANY + 1])
async def test_only_large_ones_go_aside(size: int) -> None:
    last = an_output(size)
    found, thread = await made_aside(make, given(an_output(1), last))
    assert found is last
    assert (thread is threading.main_thread()) == (size <= MANY)


async def test_without_outputs_vllm_says_so() -> None:
    assert (await made_aside(make, given()))[0] is None


async def test_errors_are_vllms_to_answer() -> None:
    assert await made_aside(make, given(error=asyncio.CancelledError())) == ("client disconnected")
    with pytest.raises(ValueError, match="lost"):
        await made_aside(make, given(an_output(1), error=ValueError("lost")))

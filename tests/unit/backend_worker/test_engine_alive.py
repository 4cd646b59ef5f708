"""A worker whose engine dies while it starts ends, rather than waiting for ever."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from backend_worker import engine
from backend_worker.engine import answered
from common.errors import EngineGoneError


def llm(*, errored: bool) -> Any:
    return SimpleNamespace(errored=errored)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ALIVE_CHECK_S", 0.01)


async def test_an_answer_is_waited_for() -> None:
    assert await answered(llm(errored=False), asyncio.sleep(0.05, "yes")) == "yes"


async def test_an_engine_that_died_never_answers() -> None:
    unanswered = asyncio.get_running_loop().create_future()
    with pytest.raises(EngineGoneError):
        await answered(llm(errored=True), unanswered)
    assert unanswered.cancelled()


async def test_an_engine_that_was_dead_before_says_so() -> None:
    async def ask() -> None:
        raise EngineDeadError

    with pytest.raises(EngineGoneError):
        await answered(llm(errored=True), ask())


async def test_who_gives_up_takes_the_question_back() -> None:
    unanswered = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(answered(llm(errored=False), unanswered))
    await asyncio.sleep(0.02)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert unanswered.cancelled()

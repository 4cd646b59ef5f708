"""A worker whose engine dies while it starts ends, rather than waiting for ever."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from backend_worker.engine import vllm_engine as engine
from backend_worker.engine.vllm_engine import Engine, answered
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


async def test_an_engine_that_died_has_settled() -> None:
    """Or a request that it died of would never end."""
    unanswered = asyncio.get_running_loop().create_future()
    started = object.__new__(Engine)
    started._llm = SimpleNamespace(errored=True, is_sleeping=lambda: unanswered)
    async with asyncio.timeout(30):
        await started.settled()


async def test_who_gives_up_takes_the_question_back() -> None:
    unanswered = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(answered(llm(errored=False), unanswered))
    await asyncio.sleep(0.02)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert unanswered.cancelled()


async def test_a_dead_engine_has_settled() -> None:
    """Whoever waits for it to have taken a request's media would wait for ever."""

    async def is_sleeping() -> bool:
        await asyncio.Event().wait()
        return False

    dead = SimpleNamespace(errored=True, is_sleeping=is_sleeping)
    await asyncio.wait_for(Engine.settled(SimpleNamespace(_llm=dead)), 60)  # type: ignore[arg-type]


async def test_an_engine_whose_ranks_disagree_has_settled() -> None:
    """One sleeps and one does not, as after a sleep that failed: all answered nevertheless."""

    async def is_sleeping() -> bool:
        raise RuntimeError("Engines returned different is_sleeping results: [True, False]")

    ranks = SimpleNamespace(errored=False, is_sleeping=is_sleeping)
    await Engine.settled(SimpleNamespace(_llm=ranks))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="different"):
        await Engine.rests(SimpleNamespace(_llm=ranks))  # type: ignore[arg-type]

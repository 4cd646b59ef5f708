"""The composition root: what was made until it fails, or is told to end, is gone."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigurationError
from frontend import app, door
from frontend.app import open_frontend
from frontend.args import FrontendArgs, parse
from tests.waiting import until


def arenas() -> set[Path]:
    return set(Path("/dev/shm").glob(f"mmrouter-arena-{os.getpid()}-*"))


@pytest.fixture
def args(tmp_path: Path) -> FrontendArgs:
    return parse([f"--discovery={tmp_path}", "--mm-arena-gb=0.001"])


async def test_all_of_it_is_there_and_gone_afterwards(args: FrontendArgs) -> None:
    before = arenas()
    async with open_frontend(args) as frontend:
        assert frontend.shared.media_sender.arena is not None
        assert len(arenas() - before) == 1
    assert arenas() == before


@pytest.mark.parametrize("part", ["MediaLoader", "Models", "ReadinessGate", "Server", "AdminGuard"])
async def test_what_was_made_before_an_error_is_closed(
    part: str, args: FrontendArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConfigurationError(f"no {part}")

    before, tasks = arenas(), asyncio.all_tasks()
    monkeypatch.setattr(door if part == "AdminGuard" else app, part, fail)
    with pytest.raises(ConfigurationError, match=f"no {part}"):
        async with open_frontend(args):
            pass
    assert arenas() == before
    assert asyncio.all_tasks() == tasks


async def test_an_arena_that_nobody_waits_for_any_more_goes(args: FrontendArgs) -> None:
    """Its thread can't be stopped."""
    before = arenas()

    async def opened() -> None:
        async with open_frontend(args):
            raise AssertionError("it was told to end")

    opening = asyncio.create_task(opened())
    await asyncio.sleep(0)  # the thread has begun
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(lambda: arenas() == before)

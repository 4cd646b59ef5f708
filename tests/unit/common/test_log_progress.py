"""What takes long says so until it has ended."""

import asyncio
import queue

import pytest

from common.observability.log_lines import log_progress


def test_it_is_said_again_and_again_and_no_more_at_the_end() -> None:
    lines: queue.Queue[str] = queue.Queue()
    with log_progress("loading", lines.put, first_s=0.001, longest_s=0.001):
        for _ in range(3):
            assert lines.get(timeout=60).startswith("loading (")
    while not lines.empty():
        lines.get()
    with pytest.raises(queue.Empty):
        lines.get(timeout=0.05)


def test_what_is_quick_says_nothing() -> None:
    lines: list[str] = []
    with log_progress("loading", lines.append, first_s=3600):
        pass
    assert lines == []


async def test_it_ends_with_an_error_and_with_a_cancelled_task() -> None:
    lines: queue.Queue[str] = queue.Queue()
    with (
        pytest.raises(ZeroDivisionError),
        log_progress("computing", lines.put, first_s=0.001, longest_s=0.001),
    ):
        lines.get(timeout=60)
        raise ZeroDivisionError

    async def wait() -> None:
        with log_progress("waiting", lines.put, first_s=0.001, longest_s=0.001):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.to_thread(lines.get, timeout=60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while not lines.empty():
        lines.get()
    with pytest.raises(queue.Empty):
        lines.get(timeout=0.05)

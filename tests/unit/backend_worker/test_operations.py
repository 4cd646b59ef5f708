"""What a worker does for operators: one operation at a time, and what it means for requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from backend_worker.engine.operations import EngineState
from backend_worker.plane import operations
from backend_worker.plane.operations import Operations
from backend_worker.plane.session import Session
from common.errors import EngineGoneError, OperationRefusedError, WorkerBusyError
from common.request_plane.operations import (
    MAX_MESSAGE_LEN,
    Condition,
    Operation,
    Outcome,
    Pause,
    PauseMode,
    ReleaseKvCacheMemory,
    ReloadWeights,
    ResetMmCache,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartProfile,
    WakeUp,
)
from common.request_plane.protocol import Operated
from tests.fakes.engine import ScriptedEngine
from tests.waiting import until

SERVING, PAUSED, ASLEEP = Condition.SERVING, Condition.PAUSED, Condition.ASLEEP


class Desk:
    """Operations over an engine that a test scripts."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.changes: list[Condition] = []
        self.sent: list[Operated] = []
        self.left: list[str] = []
        self.operations = Operations(self.engine, self._send, self._changed, self.left.append)

    async def _send(self, session: Session, operated: Operated) -> None:
        self.sent.append(operated)

    def _changed(self) -> None:
        self.changes.append(self.operations.state.condition)

    async def do(self, *wanted: Operation) -> list[Outcome]:
        return [(await self.operations.perform(one))[0] for one in wanted]

    async def hold(self, operation: Operation) -> tuple["asyncio.Task[Any]", asyncio.Event]:
        """An operation that is under way until the event is set."""
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def operating(_: Operation) -> None:
            begun.set()
            await go_on.wait()

        self.engine.operating = operating
        task = asyncio.create_task(self.operations.perform(operation))
        await begun.wait()
        return task, go_on


async def admitted(desk: Desk) -> str:
    try:
        await desk.operations.admit()
    except WorkerBusyError as error:
        return str(error)
    return ""


def raising(error: Exception) -> Callable[[Operation], Awaitable[None]]:
    async def operating(_: Operation) -> None:
        raise error

    return operating


async def test_who_sleeps_takes_nothing_from_the_moment_it_is_asked_until_it_is_awake() -> None:
    desk = Desk()
    assert await admitted(desk) == ""
    task, go_on = await desk.hold(Sleep(1, "wait"))
    assert (desk.changes, await admitted(desk)) == ([ASLEEP], "it is asleep")
    go_on.set()
    assert await task == (Outcome.DONE, "")
    assert "asleep" in await admitted(desk)
    assert await desk.do(WakeUp()) == [Outcome.DONE]
    assert desk.operations.state == EngineState()
    assert await admitted(desk) == ""
    assert desk.changes[-1] is SERVING


async def test_requests_wait_while_a_cache_is_emptied_and_hear_of_it_before_they_go_on() -> None:
    desk = Desk()
    task, go_on = await desk.hold(ResetMmCache())
    waiting = asyncio.create_task(admitted(desk))
    await asyncio.sleep(0)
    assert not waiting.done() and desk.changes == []
    go_on.set()
    await task
    assert desk.changes == [SERVING]
    assert await waiting == ""
    assert (desk.operations.media_emptied, desk.operations.blocks_emptied) == (1, 0)
    before = time.time()
    await desk.do(ResetPrefixCache())
    assert desk.operations.blocks_emptied >= before
    assert desk.operations.media_emptied == 1


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_what_an_engine_left_in_its_queue_goes_to_other_workers(mode: PauseMode) -> None:
    desk = Desk()
    await desk.do(Pause(mode))
    assert desk.left == (["it is paused"] if mode == "wait" else [])


async def test_an_engine_that_does_not_rest_keeps_its_requests() -> None:
    desk = Desk()

    async def rests() -> bool:
        return False

    desk.engine.rests = rests  # type: ignore[method-assign]
    assert await desk.do(Pause("wait")) == [Outcome.DONE]
    assert desk.left == []


async def test_nothing_stands_still_in_an_engine_that_gives_its_weights_up() -> None:
    desk = Desk()
    assert await desk.do(Sleep(2, "keep")) == [Outcome.REFUSED]
    desk.engine.resting = True
    assert await desk.do(Pause("keep"), Sleep(2, "wait")) == [Outcome.DONE, Outcome.REFUSED]
    assert await desk.do(Pause("wait"), Sleep(2, "wait")) == [Outcome.DONE, Outcome.DONE]


async def test_only_what_is_asleep_is_woken_up() -> None:
    desk = Desk()
    desk.engine.resting = True
    await desk.do(Pause("wait"), ReleaseKvCacheMemory())
    asked: list[Operation] = []

    async def operating(operation: Operation) -> None:
        asked.append(operation)

    desk.engine.operating = operating
    assert await desk.do(WakeUp(["weights"])) == [Outcome.DONE]
    assert await desk.do(WakeUp(["weights", "kv_cache"])) == [Outcome.DONE]
    assert asked == [WakeUp(["kv_cache"])]


async def test_ranks_that_disagree_fail_an_operation() -> None:
    desk = Desk()

    async def rests() -> bool:
        raise RuntimeError("ranks differ")

    desk.engine.rests = rests  # type: ignore[method-assign]
    assert await desk.operations.perform(Pause("wait")) == (Outcome.FAILED, "ranks differ")
    assert await admitted(desk) == "it is paused"


async def test_no_request_waits_for_a_profile_and_none_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    task, go_on = await desk.hold(StartProfile())
    assert await admitted(desk) == ""
    go_on.set()
    await task
    monkeypatch.setattr(operations, "WAIT_S", 0.01)
    task, go_on = await desk.hold(ResetMmCache())
    assert await admitted(desk) == "it is busy with reset_mm_cache"
    go_on.set()
    await task


async def test_one_operation_at_a_time_and_none_is_forgotten() -> None:
    desk = Desk()
    task, go_on = await desk.hold(Pause("wait"))
    outcome, message = await desk.operations.perform(Resume())
    assert outcome is Outcome.REFUSED
    assert message == "it is busy with pause: one operation at a time"
    go_on.set()
    assert await task == (Outcome.DONE, "")
    assert desk.engine.operations == [Pause("wait")]
    assert await desk.do(Resume()) == [Outcome.DONE]


async def test_what_the_engine_never_does_takes_it_out_for_no_moment() -> None:
    desk = Desk()
    desk.engine.refusal = "no sleep mode"
    assert await desk.operations.perform(Sleep(2, "wait")) == (Outcome.REFUSED, "no sleep mode")
    assert (desk.changes, desk.engine.operations) == ([], [])


ABORT, WAIT = Pause("abort"), Pause("wait")


@pytest.mark.parametrize("second", [ABORT, Sleep(1, "abort")])
async def test_who_does_not_wait_any_longer_aborts(second: Operation) -> None:
    """What the first operation waits for ends, then it is the second's turn."""
    desk = Desk()
    begun, aborted = asyncio.Event(), asyncio.Event()

    async def operating(operation: Operation) -> None:
        if operation == WAIT:
            begun.set()
            await aborted.wait()
        aborted.set()

    desk.engine.operating = operating
    first = asyncio.create_task(desk.operations.perform(WAIT))
    await begun.wait()
    assert not desk.operations.stands_still
    assert (await desk.operations.perform(Pause("wait")))[0] is Outcome.REFUSED
    assert (await desk.operations.perform(Resume()))[0] is Outcome.REFUSED
    assert await desk.operations.perform(second) == (Outcome.DONE, "")
    assert await first == (Outcome.DONE, "")
    assert desk.engine.operations == [WAIT, Pause("abort", clear_cache=False), second]
    assert desk.operations.stands_still


async def test_who_would_be_refused_afterwards_ends_no_requests_before() -> None:
    desk = Desk()
    task, go_on = await desk.hold(Sleep(1, "wait"))
    busy = (Outcome.REFUSED, "it is busy with sleep: one operation at a time")
    assert await desk.operations.perform(ABORT) == busy
    assert await desk.operations.perform(Sleep(2, "abort")) == busy
    assert desk.engine.operations == [Sleep(1, "wait")]
    go_on.set()
    assert await task == (Outcome.DONE, "")


async def test_an_operation_that_ends_as_a_request_gives_up_waiting_lets_it_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    task, go_on = await desk.hold(ResetMmCache())

    class Over:
        async def __aenter__(self) -> None:
            go_on.set()
            await task

        async def __aexit__(self, *_: object) -> None:
            raise TimeoutError

    monkeypatch.setattr(asyncio, "timeout", lambda _: Over())
    assert await admitted(desk) == ""


async def test_an_engine_that_hangs_under_a_wait_is_not_hurried_by_many() -> None:
    desk = Desk()
    stuck = asyncio.Event()

    async def operating(operation: Operation) -> None:
        await stuck.wait()

    desk.engine.operating = operating
    asked = [asyncio.create_task(desk.operations.perform(WAIT))]
    await until(lambda: len(desk.engine.operations) == 1)
    asked += [asyncio.create_task(desk.operations.perform(ABORT)) for _ in range(20)]
    await until(lambda: sum(one.done() for one in asked) == 19)
    assert len(desk.engine.operations) == 2
    asked[1].cancel()  # whoever asked for it, another may
    await asyncio.gather(asked[1], return_exceptions=True)
    again = asyncio.create_task(desk.operations.perform(ABORT))
    await until(lambda: len(desk.engine.operations) == 3)
    stuck.set()
    assert [await asked[0], await again] == [(Outcome.DONE, ""), (Outcome.DONE, "")]


@pytest.mark.parametrize(
    ("operation", "stands"), [(Pause("keep"), True), (ABORT, False), (Sleep(0, "wait"), False)]
)
async def test_requests_stand_still_once_nothing_ends_them(
    operation: Operation, stands: bool
) -> None:
    desk = Desk()
    assert not desk.operations.stands_still
    task, go_on = await desk.hold(operation)
    assert desk.operations.stands_still is stands
    go_on.set()
    await task
    assert desk.operations.stands_still
    waking: Operation = Resume() if isinstance(operation, Pause) else WakeUp()
    task, go_on = await desk.hold(waking)
    assert not desk.operations.stands_still, "an engine that hangs in it has stalled"
    go_on.set()
    await task
    assert not desk.operations.stands_still


async def test_requests_stand_still_while_a_part_of_the_memory_comes_back() -> None:
    desk = Desk()
    await desk.do(Sleep(1, "keep"))
    for tag, stands in (("weights", True), ("kv_cache", False)):
        task, go_on = await desk.hold(WakeUp([tag]))  # type: ignore[list-item]
        assert desk.operations.stands_still is stands
        go_on.set()
        await task


async def test_what_the_engine_refuses_changes_nothing() -> None:
    desk = Desk()
    desk.engine.operating = raising(OperationRefusedError("no sleep mode"))
    assert await desk.operations.perform(Sleep(2, "wait")) == (Outcome.REFUSED, "no sleep mode")
    assert (desk.operations.state, desk.operations.blocks_emptied) == (EngineState(), 0)
    assert desk.changes == [ASLEEP, SERVING]
    assert await admitted(desk) == ""


@pytest.mark.parametrize("rests", [True, False])
async def test_a_failure_is_told_and_the_engine_says_how_it_is(rests: bool) -> None:
    desk = Desk()
    desk.engine.operating = raising(RuntimeError("x" * 5000))
    desk.engine.resting = rests
    outcome, message = await desk.operations.perform(Sleep(1, "abort"))
    assert (outcome, len(message)) == (Outcome.FAILED, MAX_MESSAGE_LEN)
    assert message.startswith("RuntimeError: xxx")
    assert desk.operations.state.condition is (ASLEEP if rests else SERVING)
    assert desk.operations.media_emptied == 1  # nobody knows how far it got
    desk.engine.operating = raising(EngineGoneError("it died"))
    assert await desk.operations.perform(WakeUp()) == (Outcome.FAILED, "EngineGoneError: it died")


async def test_an_engine_that_dies_when_it_is_asked_how_it_is() -> None:
    desk = Desk()

    async def gone() -> bool:
        raise EngineGoneError("it died")

    desk.engine.rests = gone  # type: ignore[method-assign]
    assert await desk.operations.perform(Sleep(1, "wait")) == (Outcome.FAILED, "it died")
    assert "asleep" in await admitted(desk)


async def test_cancelling_leaves_nothing_running() -> None:
    desk = Desk()
    ended = asyncio.Event()

    async def operating(_: Operation) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    desk.engine.operating = operating
    task = asyncio.create_task(desk.operations.perform(ResetMmCache()))
    await until(lambda: bool(desk.engine.operations))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(ended.wait(), 60)
    assert await admitted(desk) == ""


D, R = Outcome.DONE, Outcome.REFUSED


@pytest.mark.parametrize(
    ("wanted", "outcomes", "condition"),
    [
        ([Pause("keep"), Resume()], [D, D], SERVING),
        ([Resume(), WakeUp()], [D, D], SERVING),
        ([Sleep(0, "wait"), Resume()], [D, D], SERVING),
        # Computing where no memory is would end the engine.
        ([Sleep(1, "wait"), Resume(), Pause("wait"), StartProfile()], [D, R, R, R], ASLEEP),
        ([Sleep(1, "wait"), Sleep(1, "wait"), Sleep(2, "wait")], [D, D, R], ASLEEP),
        ([Sleep(1, "wait"), ResetMmCache(), ResetPrefixCache()], [D, D, D], ASLEEP),
        ([Sleep(0, "wait"), Sleep(1, "wait"), WakeUp()], [D, D, D], SERVING),
        # One part after the other.
        ([Sleep(1, "wait"), WakeUp(["weights"])], [D, D], ASLEEP),
        ([Sleep(1, "wait"), WakeUp(["weights"]), WakeUp(["kv_cache"])], [D, D, D], SERVING),
        ([ReleaseKvCacheMemory()], [R], SERVING),
        ([Pause("wait"), ReleaseKvCacheMemory(), ReleaseKvCacheMemory()], [D, D, R], ASLEEP),
        ([Pause("wait"), ReleaseKvCacheMemory(), Sleep(2, "wait")], [D, D, D], ASLEEP),
        # After level 2 the memory of the weights holds anything.
        ([Sleep(2, "wait"), WakeUp()], [D, D], ASLEEP),
        ([Sleep(2, "wait"), ReloadWeights()], [D, R], ASLEEP),
        ([Sleep(2, "wait"), WakeUp(), ReloadWeights()], [D, D, D], SERVING),
        (
            [Sleep(2, "wait"), WakeUp(["weights"]), ReloadWeights(), WakeUp(["kv_cache"])],
            [D, D, D, D],
            SERVING,
        ),
        ([ReloadWeights(), Pause("wait"), ReloadWeights(), Resume()], [R, D, D, D], SERVING),
    ],
)
async def test_what_may_follow_what(
    wanted: list[Operation], outcomes: list[Outcome], condition: Condition
) -> None:
    desk = Desk()

    async def part(operation: Operation) -> None:
        """An engine rests until all of its memory is back."""
        state = desk.operations.state
        if isinstance(operation, WakeUp):
            after = state.after(operation, rests=True)
            woken = after.resident == EngineState().resident
            desk.engine.rests = resting if not woken else awake  # type: ignore[method-assign]
        elif isinstance(operation, Sleep | Pause | ReleaseKvCacheMemory):
            desk.engine.rests = resting  # type: ignore[method-assign]
        elif isinstance(operation, Resume):
            desk.engine.rests = awake  # type: ignore[method-assign]

    async def resting() -> bool:
        return True

    async def awake() -> bool:
        return False

    desk.engine.operating = part
    assert await desk.do(*wanted) == outcomes
    assert desk.operations.state.condition is condition
    assert (await admitted(desk) == "") == (condition is SERVING)


async def test_a_frontend_that_asks_for_everything_at_once_burdens_nobody() -> None:
    desk = Desk()
    session: Any = type("FloodingSession", (), {"operating": 0})()
    task, go_on = await desk.hold(Pause("wait"))
    stuck = asyncio.Event()

    async def send(to: Session, operated: Operated) -> None:
        desk.sent.append(operated)
        await stuck.wait()

    desk.operations._send = send
    asking = [
        asyncio.create_task(desk.operations.answer(session, number, Resume()))
        for number in range(1000)
    ]
    await until(lambda: all(one.done() for one in asking[8:]))
    assert len(desk.sent) == session.operating == 8
    stuck.set()
    go_on.set()
    await asyncio.gather(task, *asking)
    assert session.operating == 0

import asyncio
from collections.abc import Coroutine

import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput

from backend_worker.plane import outbox as module
from backend_worker.plane.outbox import Outbox
from common.errors import ProtocolError
from common.identity import RequestId
from common.request_plane.protocol import Output, Outputs
from tests.waiting import until


def an_output(name: str, *, finished: bool = False) -> Output:
    return Output(RequestId(name), [], finished)


class Line:
    """Where an outbox sends to, and what came of it."""

    def __init__(self) -> None:
        self.room = True
        self.sent: list[list[Output]] = []
        self.unsendable: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.outbox = Outbox(self._send, self._aside)

    async def put(self, output: Output) -> None:
        await self.outbox.put(output, lambda _: self.unsendable.append(output.request_id))

    async def _send(self, outputs: Outputs) -> bool:
        if not self.room:
            return False
        if any(each.request_id == "bad" for each in outputs.outputs):
            raise ProtocolError("no encoding")
        self.sent.append(outputs.outputs)
        return True

    def _aside(self, work: Coroutine[None, None, None]) -> None:
        self.tasks.add(asyncio.create_task(work))


@pytest.fixture
async def line() -> Line:
    return Line()


async def test_what_is_put_in_one_turn_leaves_in_one_message(line: Line) -> None:
    outputs = [an_output(name) for name in "bac"]
    for each in outputs:
        await line.put(each)
    assert not line.sent
    await until(lambda: line.sent == [outputs])
    later = an_output("b")
    await line.put(later)
    await until(lambda: line.sent == [outputs, [later]])


async def test_a_message_has_no_more_than_a_frontend_reads(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUTS", 2)
    for name in "abcde":
        await line.put(an_output(name))
    assert await line.outbox.send()
    assert [len(each) for each in line.sent] == [2, 2, 1]


async def test_many_log_probabilities_leave_by_themselves(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frontend decodes a message in one go."""
    monkeypatch.setattr(module, "MAX_LOGPROBS", 3)
    position = {token: Logprob(0.5) for token in (1, 2)}
    flat = FlatLogprobs()
    flat.extend([position, None, position])
    for name, logprobs in {"a": [position], "b": flat, "c": [position], "d": None}.items():
        said = CompletionOutput(0, "x", [1], None, logprobs)
        await line.put(Output(RequestId(name), [said], False))
    await line.put(Output(RequestId("prompt"), [], False, [None, position, position]))
    assert await line.outbox.send()
    sent = [[one.request_id for one in message] for message in line.sent]
    assert sent == [["a"], ["b"], ["c", "d"], ["prompt"]]


async def test_a_request_waits_until_its_last_output_has_left(line: Line) -> None:
    line.room = False
    await line.put(an_output("r"))
    waiting = [asyncio.create_task(line.put(an_output("r"))) for _ in range(2)]
    await line.put(an_output("other"))
    assert not await line.outbox.send()
    assert not any(each.done() for each in waiting)
    line.room = True
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    await until(lambda: sum(map(len, line.sent)) == 4)


async def test_what_cannot_be_sent_keeps_back_nothing_else(line: Line) -> None:
    for name in ("one", "bad", "two"):
        await line.put(an_output(name))
    assert await line.outbox.send()
    assert [each.request_id for (each,) in line.sent] == ["one", "two"]
    assert line.unsendable == ["bad"]


async def test_nobody_waits_at_a_closed_one(line: Line) -> None:
    line.room = False
    await line.put(an_output("r"))
    waiting = asyncio.create_task(line.put(an_output("r")))
    await asyncio.sleep(0)
    line.outbox.close()
    await asyncio.wait_for(waiting, 60)
    await asyncio.wait_for(line.put(an_output("q")), 60)
    line.room = True
    assert await line.outbox.send()
    await asyncio.wait_for(asyncio.gather(*line.tasks), 60)
    assert not line.sent


async def test_whoever_no_longer_waits_adds_nothing(line: Line) -> None:
    line.room = False
    first = an_output("r")
    await line.put(first)
    waiting = asyncio.create_task(line.put(an_output("r", finished=True)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    line.room = True
    assert await line.outbox.send()
    assert line.sent == [[first]]

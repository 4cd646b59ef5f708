import asyncio

from backend_worker.outbox import Outbox
from common.identity import RequestId
from common.protocol import Output
from tests.waiting import until


def an_output(name: str, *, finished: bool = False) -> Output:
    return Output(RequestId(name), [], finished)


async def test_outputs_leave_in_the_order_in_which_they_came() -> None:
    outbox = Outbox()
    assert not outbox and outbox.first(9) == []
    outputs = [an_output(name) for name in "bac"]
    for each in outputs:
        await outbox.put(each)
    assert outbox and outbox.first(2) == outputs[:2]
    assert outbox.first(9) == outputs, "they stay until they were sent"
    outbox.take_out(outputs[:2])
    assert outbox.first(9) == outputs[2:]
    outbox.take_out(outputs[2:])
    assert not outbox


async def test_a_request_waits_until_its_last_output_has_left() -> None:
    outbox = Outbox()
    first, other, second, third = (an_output(name) for name in "rorr")
    await outbox.put(first)
    waiting = [asyncio.create_task(outbox.put(each)) for each in (second, third)]
    await asyncio.sleep(0)
    await outbox.put(other)
    outbox.take_out([other])
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(each.done() for each in waiting), "another one's has left"
    outbox.take_out([first])
    await until(lambda: waiting[0].done())
    assert not waiting[1].done() and len(outbox.first(9)) == 1
    outbox.take_out([second])
    await asyncio.wait_for(waiting[1], 60)


async def test_nobody_waits_at_a_closed_one() -> None:
    outbox = Outbox()
    await outbox.put(an_output("r"))
    waiting = asyncio.create_task(outbox.put(an_output("r")))
    await asyncio.sleep(0)
    sending = outbox.first(9)
    outbox.close()
    await asyncio.wait_for(waiting, 60)
    await asyncio.wait_for(outbox.put(an_output("q")), 60)
    assert not outbox
    outbox.take_out(sending)  # it was closed while they were sent


async def test_whoever_no_longer_waits_adds_nothing() -> None:
    outbox = Outbox()
    first = an_output("r")
    await outbox.put(first)
    waiting = asyncio.create_task(outbox.put(an_output("r", finished=True)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    outbox.take_out([first])
    assert not outbox

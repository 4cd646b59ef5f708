"""Bulk calls leave slots to others, and the request that has least goes first."""

import asyncio
from collections.abc import Callable

import pytest

from common.errors import DeadlineExceededError, OverloadedError, RequestRejectedError
from frontend.request import FaultSettings
from frontend.request.call_gate import CALLS_AT_ONCE, FEW_BIASES, MAX_BIASES, CallGate
from frontend.request.deadlines import Deadlines
from frontend.request_context import begin
from frontend.router import Slots
from tests.waiting import until

TOKENS = 10


class Lab:
    """Counts the choices of each request that have begun, and ends calls when told to."""

    def __init__(self, slots: int, most: int = 1 << 20) -> None:
        self.slots = Slots(slots, slots, 0, 1 << 32)
        self.gate = CallGate(lambda: self.slots, most)
        self.begun: dict[str, int] = {}
        self.computed: dict[str, list[Callable[[], None]]] = {}
        self.end = asyncio.Semaphore(0)

    async def call(self, whose: str, choices: int, timeout_s: float, biases: int) -> None:
        deadlines = Deadlines(FaultSettings(request_timeout_s=timeout_s))
        async with self.gate.call(deadlines, TOKENS, choices, biases) as computed:
            self.computed.setdefault(whose, []).append(computed)
            self.begun[whose] = self.begun.get(whose, 0) + choices
            await self.end.acquire()

    async def _request(
        self, whose: str, calls: int, choices: int, peer: str, timeout_s: float, biases: int
    ) -> None:
        begin().peer = peer
        await asyncio.gather(*(self.call(whose, choices, timeout_s, biases) for _ in range(calls)))

    def request(
        self,
        whose: str,
        calls: int = 1,
        choices: int = 1,
        peer: str = "",
        timeout_s: float = 0.0,
        biases: int = 0,
    ) -> asyncio.Task[None]:
        work = self._request(whose, calls, choices, peer, timeout_s, biases)
        return asyncio.create_task(work)

    async def rest(self) -> None:
        """Let all begin that can."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def finish(self, *requests: asyncio.Task[None]) -> None:
        for _ in range(10_000):
            self.end.release()
        await asyncio.gather(*requests)


async def test_prompts_of_one_request_leave_slots_and_single_calls_start_at_once() -> None:
    lab = Lab(slots=16)
    many = lab.request("many", calls=100)
    await lab.rest()
    assert lab.begun == {"many": 14}
    singles = [lab.request(f"single {number}") for number in range(20)]
    await lab.rest()
    assert len(lab.begun) == 21
    await lab.finish(many, *singles)
    assert lab.begun["many"] == 100


async def test_prompts_of_one_request_wait_while_all_workers_are_busy() -> None:
    lab = Lab(slots=16)
    lab.slots = lab.slots._replace(busy=True)
    many = lab.request("many", calls=5)
    single = lab.request("single")
    await lab.rest()
    assert lab.begun == {"many": 2, "single": 1}  # its first, and the only one in bulk
    lab.slots = lab.slots._replace(busy=False)
    await lab.finish(many, single)
    assert lab.begun["many"] == 5


async def test_a_few_choices_of_one_prompt_start_at_once() -> None:
    """`n: 2` waited for 27 seconds beside one stream of 300 prompts."""
    lab = Lab(slots=16)
    many = lab.request("many", calls=100)
    few, several = lab.request("few", choices=4), lab.request("several", choices=5)
    await lab.rest()
    assert lab.begun == {"many": 14, "few": 4}
    await lab.finish(many, few, several)
    assert lab.begun == {"many": 100, "few": 4, "several": 5}


async def test_who_does_not_read_answers_keeps_its_own_calls_from_starting_only() -> None:
    """A stream of 300 prompts that nobody read kept all choices of others waiting for a minute."""
    lab = Lab(slots=16)
    unread = lab.request("unread", calls=100)
    await lab.rest()
    other = lab.request("other", choices=8)
    await lab.rest()
    assert lab.begun == {"unread": 14}
    for computed in [*lab.computed["unread"]]:
        computed()
        computed()  # e.g. of two attempts
    await lab.rest()
    assert lab.begun == {"unread": 14, "other": 8}
    another = lab.request("another", choices=6)
    await lab.rest()
    assert lab.begun == {"unread": 14, "other": 8, "another": 6}
    await lab.finish(unread, other, another)
    assert lab.begun["unread"] == 100
    await lab.finish(lab.request("next", calls=14))


async def test_slots_that_other_frontends_take_are_not_free() -> None:
    lab = Lab(slots=16)
    lab.slots = lab.slots._replace(others=10)
    many = lab.request("many", calls=9)
    await lab.rest()
    assert lab.begun == {"many": 4}
    lab.slots = lab.slots._replace(others=0)
    lab.end.release()
    await lab.rest()
    assert lab.begun == {"many": 9}
    await lab.finish(many)


async def test_choices_are_counted_as_what_they_are_in_an_engine() -> None:
    lab = Lab(slots=64)
    one, other = lab.request("one", choices=32), lab.request("other", choices=25)
    await lab.rest()
    assert lab.begun == {"one": 32}
    lab.end.release()
    await lab.rest()
    assert lab.begun == {"one": 32, "other": 25}
    await lab.finish(one, other)


async def test_prompts_of_one_request_leave_room_in_the_caches_of_workers() -> None:
    lab = Lab(slots=64)
    lab.slots = lab.slots._replace(tokens=8 * TOKENS)
    many = lab.request("many", calls=20)
    await lab.rest()
    assert lab.begun == {"many": 7}  # the first, and six that are bulk
    await lab.finish(many)
    assert lab.begun == {"many": 20}


async def test_choices_start_if_no_other_bulk_call_runs_however_full_engines_are() -> None:
    lab = Lab(slots=64)
    lab.slots = lab.slots._replace(others=64)
    task = lab.request("one", choices=20)
    await until(lambda: lab.begun == {"one": 20})
    await lab.finish(task)


@pytest.mark.parametrize(("slots", "most"), [(1, 16), (64, 32), (256, 128)])
async def test_one_call_asks_for_half_of_an_engine_at_most(slots: int, most: int) -> None:
    lab = Lab(slots)
    await lab.finish(lab.request("fits", choices=most))
    with pytest.raises(RequestRejectedError, match=f"more than the {most} "):
        await lab.finish(lab.request("too many", choices=most + 1))


async def test_without_workers_no_call_asks_for_too_much() -> None:
    lab = Lab(slots=0)
    await lab.finish(lab.request("waits for a worker", choices=100))


async def test_who_has_least_goes_first() -> None:
    lab = Lab(slots=16)
    many = [lab.request("many", 50, peer="hers"), lab.request("more", 50, peer="hers")]
    await lab.rest()
    late = lab.request("late", calls=4, peer="his")
    await lab.rest()
    assert lab.begun["late"] == 1  # its first call, beside the 14 that the slots have room for
    for _ in range(6):
        lab.end.release()
        await lab.rest()
    assert lab.begun["late"] == 4
    assert lab.begun["many"] == 14 and lab.begun["more"] > 1
    await lab.finish(*many, late)


async def test_who_leaves_gives_its_slots_back() -> None:
    lab = Lab(slots=8)
    leaving = lab.request("leaving", calls=30)
    staying = lab.request("staying", calls=8)
    await lab.rest()
    assert lab.begun == {"leaving": 7, "staying": 1}
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await lab.rest()
    assert lab.begun == {"leaving": 7, "staying": 7}
    await lab.finish(staying)


async def test_a_call_that_is_cancelled_while_it_is_let_in_leaves_nothing_behind() -> None:
    lab = Lab(slots=8)
    first, second = lab.request("first", choices=7), lab.request("second", choices=7)
    await lab.rest()
    second.cancel()
    lab.end.release()  # and with it the second would begin
    await asyncio.gather(first, second, return_exceptions=True)
    third = lab.request("third", choices=7)
    await until(lambda: lab.begun.get("third") == 7)
    await lab.finish(third)


async def test_who_waits_too_long_is_told_and_leaves_its_place() -> None:
    lab = Lab(slots=8)
    first = lab.request("first", choices=7)
    await lab.rest()
    with pytest.raises(DeadlineExceededError):
        await lab.request("late", choices=7, timeout_s=0.01)
    third = lab.request("third", choices=7)
    await lab.finish(first, third)
    assert lab.begun == {"first": 7, "third": 7}


async def test_no_more_run_than_a_frontend_may_have() -> None:
    lab = Lab(slots=10_000, most=20)
    many = lab.request("many", calls=100)
    await lab.rest()
    assert lab.begun == {"many": 20}
    await lab.finish(many)


async def test_a_thousand_calls_that_come_together_give_others_their_turn() -> None:
    lab = Lab(slots=4000)
    many = [lab.request("many", calls=100) for _ in range(10)]
    before, began = 0, []
    while before < 1000:
        await asyncio.sleep(0)
        now = lab.begun.get("many", 0)
        began.append(now - before)
        before = now
    assert max(began) <= CALLS_AT_ONCE
    await lab.finish(*many)


async def test_biases_of_several_requests_have_a_limit_together() -> None:
    """One request alone may have more, and few of each are not counted."""
    lab = Lab(slots=16)
    alone = lab.request("alone", calls=3, biases=MAX_BIASES)
    await lab.rest()
    few = [lab.request(f"few {number}", biases=FEW_BIASES) for number in range(20)]
    with pytest.raises(OverloadedError, match="logit_bias"):
        await lab.request("further", biases=FEW_BIASES + 1)
    assert "further" not in lab.begun
    for computed in lab.computed["alone"]:
        computed()  # whether it is read or not
    later = lab.request("later", biases=MAX_BIASES)
    await lab.rest()
    assert lab.begun["later"] == 1
    await lab.finish(alone, *few, later)
    await lab.finish(lab.request("again", biases=MAX_BIASES))

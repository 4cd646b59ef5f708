"""Closed and open loops of the serving benchmark, over answers that the test gives."""

import asyncio
from collections import Counter

import pytest

from tests.benchmarks.fleet_clients import Cut, Odd, Outcome, Whole
from tests.benchmarks.serving.play import FailedRequestError, arrivals, play
from tests.benchmarks.serving.traffic import BURST, Closed, Open, load


def whole(body: bytes) -> Whole:
    return Whole(body.decode(), 1, 1, 0, [0.1])


class Server:
    """Answers when all clients that may ask have asked."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.asked: list[bytes] = []
        self.waiting: set[bytes] = set()
        self.most = 0
        self._round = asyncio.Barrier(clients)

    async def send(self, body: bytes) -> Outcome:
        self.asked.append(body)
        self.waiting.add(body)
        self.most = max(self.most, len(self.waiting))
        await self._round.wait()
        self.waiting.discard(body)
        return whole(body)


async def test_a_closed_loop_has_so_many_clients_and_keeps_the_order_of_a_session() -> None:
    server = Server(3)
    bodies = [[f"{user} {turn}".encode() for turn in range(2)] for user in range(6)]
    played = await play(bodies, Closed(3), [], server.send)
    assert server.most == 3
    assert [answer.text for answer in played.answers] == [
        body.decode() for session in bodies for body in session
    ]
    for user in range(6):
        assert server.asked.index(bodies[user][0]) < server.asked.index(bodies[user][1])
    assert server.asked[:3] == [session[0] for session in bodies[:3]]


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = Server(5)  # answers nobody before all have asked
    played = await play([[b"a"], [b"b"], [b"c"], [b"d"], [b"e"]], Open(1e6), [0.0] * 5, server.send)
    assert len(played.answers) == 5


@pytest.mark.parametrize("pace", [Closed(2), Open(1e6)])
async def test_a_failure_ends_the_block_and_its_other_requests(pace: Closed | Open) -> None:
    cancelled: list[bytes] = []
    others = asyncio.Event()

    async def send(body: bytes) -> Outcome:
        if body == b"bad":
            await others.wait()
            return Cut(True, "broken")
        try:
            others.set()
            await asyncio.Event().wait()
        finally:
            cancelled.append(body)
        raise AssertionError

    with pytest.raises(FailedRequestError, match="broken"):
        await play([[b"bad"], [b"slow"]], pace, [0.0, 0.0], send)
    assert cancelled == [b"slow"]


async def test_an_odd_answer_is_a_failure_too() -> None:
    async def send(body: bytes) -> Outcome:
        return Odd("503 busy")

    with pytest.raises(FailedRequestError, match="503 busy"):
        await play([[b"a"]], Closed(1), [], send)


def test_arrivals_are_those_of_their_seed_at_the_rate_of_requests() -> None:
    sessions = load("chats@5/s").block(1, 0, "a", 4000)
    moments = arrivals(Open(5.0), "1", sessions)
    assert moments == arrivals(Open(5.0), "1", sessions) != arrivals(Open(5.0), "2", sessions)
    assert moments[0] == 0.0 and moments == sorted(moments)
    assert 4000 / moments[-1] == pytest.approx(5.0, rel=0.15)


def test_a_burst_arrives_as_one_at_the_rate_of_requests() -> None:
    sessions = load("bursts@5/s").block(1, 0, "a", 4000)
    moments = arrivals(Open(5.0), "1", sessions)
    assert len(moments) == 4000 and moments == sorted(moments)
    assert set(Counter(moments).values()) == {BURST}
    assert 4000 / moments[-1] == pytest.approx(5.0, rel=0.15)

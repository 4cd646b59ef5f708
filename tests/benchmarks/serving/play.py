"""Asks what a block has, at its pace."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.benchmarks.fleet_clients import Cut, Odd, Outcome, Whole
from tests.benchmarks.fleet_traffic import Message
from tests.benchmarks.serving.traffic import Closed, Open, Pace, Session

Bodies = Sequence[Sequence[bytes]]
"""Of each session, its requests as they go over the wire."""

Send = Callable[[bytes], Awaitable[Outcome]]


class FailedRequestError(Exception):
    """A request got no whole answer, so the block says nothing."""


@dataclass(frozen=True)
class Played:
    """What came of a block.

    Attributes:
        answers: in the order of sessions and their requests.
        seconds: from the first request to the last answer.
    """

    answers: Sequence[Whole]
    seconds: float


def arrivals(pace: Open, seed: str, sessions: Sequence[Session]) -> list[float]:
    """When each session begins, in seconds: a Poisson process.

    Neighbours that ask the same come together, as one arrival.

    Raises:
        ZeroDivisionError: there are no sessions.
    """
    together = [len(list(same)) for _, same in itertools.groupby(sessions, _asked)]
    rate = pace.rate * len(together) / sum(map(len, sessions))
    draw = random.Random(f"{seed} arrivals")
    moments: list[float] = []
    now = 0.0
    for count in together:
        moments += [now] * count
        now += draw.expovariate(rate)
    return moments


def _asked(session: Session) -> list[tuple[Message, ...]]:
    return [ask.messages for ask in session]


async def play(bodies: Bodies, pace: Pace, moments: Sequence[float], send: Send) -> Played:
    """Ask all of it.

    Args:
        moments: when each session begins; not looked at in a closed loop.

    Raises:
        FailedRequestError: for any request without a whole answer; the others are cancelled.
    """
    clock = asyncio.get_running_loop().time
    answers: list[list[Whole]] = [[] for _ in bodies]
    start = clock()

    async def session(number: int) -> None:
        for body in bodies[number]:
            answers[number].append(_whole(await send(body)))

    async def client(waiting: Iterator[int]) -> None:
        for number in waiting:
            await session(number)

    async def at(number: int) -> None:
        await asyncio.sleep(start + moments[number] - clock())
        await session(number)

    try:
        async with asyncio.TaskGroup() as group:
            match pace:
                case Closed(clients):
                    waiting = iter(range(len(bodies)))
                    for _ in range(clients):
                        group.create_task(client(waiting))
                case Open():
                    for number in range(len(bodies)):
                        group.create_task(at(number))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the others failed after it, or by it
    return Played([each for some in answers for each in some], clock() - start)


def _whole(outcome: Outcome) -> Whole:
    match outcome:
        case Whole():
            return outcome
        case Cut() | Odd():
            raise FailedRequestError(f"a request failed, so nothing is measured: {outcome}")

"""The last minutes, kept for a page that is opened later."""

import operator
from collections.abc import Callable
from typing import Any, cast

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse

from common.observability.telemetry import (
    FIRST_TOKEN_S,
    INTER_TOKEN_LATENCY,
    TIME_TO_FIRST_TOKEN,
)
from frontend.asgi import Door, Receive, Scope, Send
from frontend.http.operator.history import (
    STEPS,
    History,
    Queue,
    Totals,
    history_routes,
    read_totals,
)
from frontend.processes import Siblings
from frontend.request_context import current_context


class Hours:
    """A clock, and totals, that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.totals = Totals()

    def history(self, siblings: Any = None) -> History:
        read: Callable[[], Totals] = lambda: self.totals  # noqa: E731
        history = History(read, lambda: self.now)
        history.share(cast(Siblings | None, siblings))
        return history

    def pass_by(self, history: History, **totals: float) -> None:
        self.now += 10
        self.totals = msgspec.structs.replace(self.totals, **totals)
        history.step()


async def test_each_step_has_what_came_since_the_one_before() -> None:
    hours = Hours()
    history = hours.history()
    hours.pass_by(history, requests=3, first_tokens=2, first_token_seconds=0.5)
    hours.pass_by(history, requests=7)
    # A worker that left took what it counted along.
    hours.pass_by(history, requests=5)
    hours.pass_by(history, requests=6)
    told = await history.told()
    assert [one.at for one in told] == [1010, 1020, 1030, 1040]
    assert [one.totals.requests for one in told] == [3, 4, 0, 1]
    assert (told[0].totals.first_tokens, told[0].totals.first_token_seconds) == (2, 0.5)


@pytest.mark.parametrize(("back_s", "counted"), [(15, 1 + 8), (3600, 8)])
async def test_a_clock_that_is_set_back_hides_nothing_that_follows(
    back_s: int, counted: int
) -> None:
    hours = Hours()
    history = hours.history()
    for number in range(3):
        hours.pass_by(history, requests=number)
    hours.now -= back_s
    hours.pass_by(history, requests=10)
    told = await history.told()
    assert (told[-1].at, told[-1].totals.requests) == (round(hours.now / 10) * 10, counted)
    assert [one.at for one in told] == sorted({one.at for one in told})


async def test_no_more_is_kept_than_is_shown() -> None:
    hours = Hours()
    history = hours.history()
    for number in range(STEPS + 5):
        hours.pass_by(history, requests=number)
    assert len(await history.told()) == STEPS


def test_each_step_is_a_line_unless_nothing_happened(caplog: pytest.LogCaptureFixture) -> None:
    hours, queues = Hours(), {"w0": Queue(3, 1)}
    history = History(lambda: hours.totals, lambda: hours.now, lambda: queues)
    caplog.set_level("INFO", "frontend.http.operator.history")
    hours.pass_by(history)
    assert caplog.messages == []
    hours.pass_by(
        history, requests=4, prompt_tokens=2000, predicted=1000, realised=500, output_tokens=640,
        first_tokens=4, first_token_seconds=1,
    )  # fmt: skip
    queues |= {f"w{number}": Queue(2, 0) for number in range(1, 9)}
    hours.pass_by(history, output_tokens=650, status_429=2, broken=1)
    hours.pass_by(history, ok=5)
    assert caplog.messages == [
        "4 requests in 10 s; 200 prompt tokens/s; 64 output tokens/s; prefix cache hit rate 25% "
        "(predicted 50%); first token after 0.250 s; w0: 3 running, 1 waiting",
        "0 requests in 10 s; 0 prompt tokens/s; 1 output tokens/s; errors 429: 2, broken: 1; "
        "9 workers: 19 running, 1 waiting",
    ]


class Others:
    """Siblings that took steps of their own."""

    def __init__(self) -> None:
        self.tells: dict[str, Any] = {}

    def tell(self, topic: str, tell: Any) -> None:
        self.tells[topic] = tell

    async def ask(self, topic: str, argument: bytes = b"") -> dict[str, bytes]:
        return {str(each): self.tells[topic](argument) for each in range(2)}


async def test_the_steps_of_all_processes_add_up() -> None:
    hours = Hours()
    history = hours.history(Others())
    hours.now += 3.4  # whenever they look at the clock
    hours.pass_by(history, requests=2)
    assert [(at, totals.requests) for at, totals in await history.told()] == [(1010, 6)]


async def test_it_is_json() -> None:
    hours = Hours()
    history = hours.history()
    hours.pass_by(history, predicted=5, prompt_tokens=9)
    app = FastAPI()
    app.include_router(history_routes(history))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        (step,) = (await http.get("/mmrouter/history")).json()
    assert (step["at"], step["predicted"], step["prompt_tokens"]) == (1010, 5, 9)
    assert len(step["first_token_within"]) == len(FIRST_TOKEN_S) + 1


async def test_answers_are_counted_by_status() -> None:
    hours = Hours()
    history = History(clock=lambda: hours.now)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current_context().failed = scope["path"] == "/broken"
        if scope["path"] != "/gone":
            status = int(scope["path"][1:]) if scope["path"][1:].isdigit() else 200
            await JSONResponse({}, status)(scope, receive, send)

    transport = httpx.ASGITransport(Door(app, [history.watch]))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        for path in ("/200", "/200", "/429", "/503", "/404", "/500", "/501", "/broken", "/status"):
            await http.post(path)
        await http.get("/500")  # a probe's, say
        await http.post("/mmrouter/workers/w0/drain")
        with pytest.raises(AssertionError):
            await http.post("/gone")
    hours.now += 10
    history.step()
    ((_, totals),) = await history.told()
    assert (totals.ok, totals.status_429, totals.status_503) == (2, 1, 1)
    assert (totals.status_4xx, totals.status_5xx, totals.broken) == (1, 2, 1)


def test_the_metrics_are_read() -> None:
    before = read_totals()
    TIME_TO_FIRST_TOKEN.observe(2.5)
    INTER_TOKEN_LATENCY.observe(0.1, 4)
    after = read_totals()
    assert after.first_tokens - before.first_tokens == 1
    assert after.first_token_seconds - before.first_token_seconds == 2.5
    assert after.output_tokens - before.output_tokens == 5
    grown = after.combined(before, operator.sub).first_token_within
    assert grown == tuple(float(edge >= 2.5) for edge in (*FIRST_TOKEN_S, 1e9))

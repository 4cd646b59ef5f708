"""What one API key, and all together, may take: places and memory for bodies."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import OverloadedError
from frontend.asgi import Arrival, Door, Message, Receive, Scope, Send
from frontend.http.limits.admission import Admission
from frontend.http.limits.tenant_limits import TenantQuota
from frontend.http.server.uvicorn_server import raise_file_limit
from frontend.http.settings import HttpSettings
from frontend.request_context import EVERYBODY, Tenant
from tests.waiting import until

ONE, TWO = Tenant("one"), Tenant("two")
MB = 1 << 20


def test_nobody_takes_more_than_a_share_and_nobody_the_last() -> None:
    budget = TenantQuota("things", total=5, of_one=3)
    budget.take(ONE, 3)
    with pytest.raises(OverloadedError, match="this client has its share of things"):
        budget.take(ONE)
    budget.take(TWO, 2)
    with pytest.raises(OverloadedError, match="no room for more things"):
        budget.take(TWO)
    budget.give_back(ONE, 3)
    budget.take(TWO)
    budget.give_back(TWO, 3)
    assert (budget.taken, dict(budget._taken)) == (0, {})


def test_asking_leaves_nothing_behind() -> None:
    budget = TenantQuota("things", total=1, of_one=1)
    for number in range(100):
        budget.check(Tenant(f"stranger {number}"))
    assert not budget._taken


class Shop:
    """Requests of several keys, whose bodies and work a test has in its hands."""

    def __init__(self, settings: HttpSettings, *, several_keys: bool) -> None:
        self.done = asyncio.Event()
        self.started = 0
        self.gate = Admission(settings, several_keys=several_keys)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started += 1
        await self.done.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(
        self,
        tenant: Tenant,
        body: AsyncIterator[bytes] | None,
        length: int,
        path: str = "/v1/completions",
    ) -> int:
        """The status that a request gets.

        Args:
            body: pieces, each with more to follow; None for no body.
        """
        statuses = []

        async def receive() -> Message:
            if body is None:
                return {"type": "http.request", "body": b"", "more_body": False}
            return {"type": "http.request", "body": await anext(body), "more_body": True}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"content-length", b"%d" % length)]

        async def guard(arrival: Arrival) -> None:
            arrival.context.tenant = tenant

        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await Door(self._work, [guard, self.gate])(scope, receive, send)
        (status,) = statuses
        return int(status)

    def start(
        self, tenant: Tenant, body: AsyncIterator[bytes] | None = None, length: int = 0
    ) -> asyncio.Task[int]:
        return asyncio.create_task(self.ask(tenant, body, length))


@pytest.mark.parametrize("several_keys", [False, True])
async def test_one_key_of_several_can_not_take_all_places(several_keys: bool) -> None:
    shop = Shop(HttpSettings(max_inflight=4, key_share=0.5), several_keys=several_keys)
    mine = [shop.start(ONE) for _ in range(2)]
    await until(lambda: shop.started == 2)
    more = shop.start(ONE)
    if several_keys:
        assert await more == 429
    else:
        await until(lambda: shop.started == 3)
        mine.append(more)
    theirs = [shop.start(TWO)]
    await until(lambda: shop.started == len(mine + theirs))
    shop.done.set()
    assert set(await asyncio.gather(*mine, *theirs)) == {200}
    assert await shop.start(ONE) == 200


async def test_a_body_for_which_there_is_no_memory_is_a_503() -> None:
    async def lacking() -> AsyncIterator[bytes]:
        yield bytes(MB)
        raise MemoryError

    shop = Shop(HttpSettings(), several_keys=False)
    assert await shop.start(ONE, lacking(), 2 * MB) == 503
    assert (shop.gate._bodies.budget.taken, shop.started) == (0, 0)


async def test_an_operator_needs_no_place() -> None:
    shop = Shop(HttpSettings(max_inflight=1), several_keys=False)
    mine = shop.start(ONE)
    await until(lambda: shop.started == 1)
    assert await shop.start(ONE) == 429
    operator = asyncio.create_task(shop.ask(EVERYBODY, None, 0, "/mmrouter/workers/w0/sleep"))
    await until(lambda: shop.started == 2)
    shop.done.set()
    assert (await mine, await operator) == (200, 200)


async def piecewise(count: int, then: asyncio.Event) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(MB // 4)
    await then.wait()
    while True:
        yield bytes(MB // 4)


async def test_one_key_of_several_can_not_take_all_memory_for_bodies() -> None:
    settings = HttpSettings(max_body_mb=1, body_memory_mb=4)
    shop = Shop(settings, several_keys=True)
    go_on = asyncio.Event()
    mine = [shop.start(ONE, piecewise(4, go_on), MB) for _ in range(2)]
    memory = shop.gate._bodies.budget
    await until(lambda: memory.taken == 2 * MB)
    assert await shop.start(ONE, piecewise(4, go_on), MB) == 429
    theirs = [shop.start(TWO, piecewise(4, go_on), MB) for _ in range(2)]
    await until(lambda: memory.taken == 4 * MB)
    assert await shop.start(EVERYBODY, piecewise(1, go_on), MB) == 429
    go_on.set()
    assert set(await asyncio.gather(*mine, *theirs)) == {413}
    assert memory.taken == 0


async def test_a_request_that_is_cancelled_anywhere_gives_back_what_it_took() -> None:
    shop = Shop(HttpSettings(), several_keys=True)
    go_on = asyncio.Event()
    reading = shop.start(ONE, piecewise(1, go_on), MB)
    working = shop.start(ONE)
    memory, places = shop.gate._bodies.budget, shop.gate._places
    await until(lambda: memory.taken and places.taken)
    for task in (reading, working):
        task.cancel()
    await asyncio.gather(reading, working, return_exceptions=True)
    assert (memory.taken, places.taken) == (0, 0)


async def test_who_is_refused_anyway_is_not_read() -> None:
    shop = Shop(HttpSettings(max_inflight=1), several_keys=False)
    working = shop.start(ONE)
    await until(lambda: shop.started)

    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("it is read in vain")
        yield b""

    assert await shop.start(TWO, never(), 5) == 429
    shop.done.set()
    assert await working == 200


@pytest.mark.parametrize(
    ("settings", "memory"),
    [({}, 2048 * MB), ({"max_body_mb": 3000}, 3000 * MB), ({"body_memory_mb": 100}, 100 * MB)],
)
def test_there_is_memory_for_one_body_of_any_allowed_size(
    settings: dict[str, float], memory: int
) -> None:
    assert HttpSettings(**settings).body_memory_bytes == memory


def test_too_few_open_files_are_complained_about(caplog: pytest.LogCaptureFixture) -> None:
    raise_file_limit(1)
    assert not caplog.records
    raise_file_limit(10**9)
    assert "ulimit -n" in caplog.text

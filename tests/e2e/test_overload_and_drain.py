"""Too much to do, and processes that are asked to leave: nothing is lost, nothing waits."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Endpoint, Stack, wait_for_workers
from tests.e2e.lab import image, words
from tests.e2e.processes import (
    HttpServer,
    engine_pid,
    paused,
    shared_memory_of,
    start_frontend,
    start_worker,
)
from tests.pictures import data_uri, picture
from tests.waiting import until as eventually

WORDS: dict[str, Any] = {"role": "user", "content": "Tell me a story"}
CLIENTS = 2
PROMPTS = 4
PAUSE_S = 2.0
"""Between the requests of one client: engines that start need the processor as well."""

LIMIT = 2


@pytest.fixture(scope="module")
def frontend(stack: Stack) -> Iterator[HttpServer]:
    """A frontend that works on few requests at once, and gives workers one in turn: which of them
    is idle must not be left to what they know."""
    flags = (f"--max-inflight={LIMIT}", "--router-mode=round-robin")
    server = start_frontend("narrow", stack.discovery, stack.logs, *flags)
    try:
        wait_for_workers(server, list(stack.workers.values()))
        yield server
    finally:
        server.stop()


@pytest.fixture
def engines(stack: Stack) -> dict[str, int]:
    """Processes that compute, by the name of their worker."""
    return {name: engine_pid(stack.discovery, name) for name in stack.workers}


@pytest.fixture
async def http(frontend: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=frontend.url, timeout=120) as client:
        yield client


def chat(message: dict[str, Any], tokens: int, *, stream: bool = True) -> dict[str, Any]:
    return {
        "model": "demo", "messages": [message], "stream": stream,
        "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip


class Stream:
    """An answer that is being read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self._lines = response.aiter_lines()
        self.text = ""
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None

    async def first_word(self) -> None:
        while not self.text:
            assert await self._event()

    async def end(self) -> None:
        while await self._event():
            pass

    async def _event(self) -> bool:
        async for line in self._lines:
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return False
            event = json.loads(line.removeprefix("data: "))
            self.error = event.get("error", self.error)
            for choice in event.get("choices", ()):
                self.text += choice["delta"].get("content") or ""
                self.finish_reason = choice["finish_reason"] or self.finish_reason
            return True
        return False


async def until(
    http: httpx.AsyncClient, seen: Callable[[dict[str, Any]], int], number: int
) -> None:
    """Wait until the frontend sees that much at all workers together."""
    async with asyncio.timeout(60):
        while True:
            views = (await http.get("/mmrouter/workers")).json()
            if sum(map(seen, views)) == number:
                return
            await asyncio.sleep(0.05)


def active(worker: dict[str, Any]) -> int:
    return int(worker["active_requests"])


def reports_work(worker: dict[str, Any]) -> int:
    return (worker["running"], worker["waiting"]) != (0, 0)


def busy(worker: dict[str, Any]) -> int:
    return sum(rank["busy"] for rank in worker["ranks"])


async def test_more_than_it_can_take_is_refused_while_health_and_models_answer(
    engines: dict[str, int], http: httpx.AsyncClient
) -> None:
    bodies = (chat(WORDS, 1), chat(WORDS, 1, stream=False))
    with paused(*engines.values()):
        taken = [
            asyncio.create_task(http.post("/v1/chat/completions", json=body))
            for body in itertools.islice(itertools.cycle(bodies), LIMIT)
        ]
        await until(http, active, LIMIT)
        for body in bodies:
            refused = await http.post("/v1/chat/completions", json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == 429
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "demo"
    for answer in await asyncio.gather(*taken):
        assert answer.status_code == 200 and "error" not in answer.text
    accepted = await http.post("/v1/chat/completions", json=bodies[1])
    assert accepted.status_code == 200


@pytest.mark.parametrize(
    "threshold", ["--router-busy-prefill-tokens=1", "--router-busy-blocks-fraction=0.000001"]
)
async def test_when_all_workers_are_busy_more_is_refused_until_they_are_not(
    stack: Stack, engines: dict[str, int], threshold: str
) -> None:
    server = start_frontend("busy", stack.discovery, stack.logs, threshold)
    try:
        await asyncio.to_thread(wait_for_workers, server, list(stack.workers.values()))
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            with paused(*engines.values()):
                taken = []
                for number in range(1, 1 + len(engines)):
                    post = http.post("/v1/chat/completions", json=chat(WORDS, 1, stream=False))
                    taken.append(asyncio.create_task(post))
                    await until(http, busy, number)
                for body in (chat(WORDS, 1), chat(WORDS, 1, stream=False)):
                    refused = await http.post("/v1/chat/completions", json=body)
                    assert refused.status_code == 503
                    assert int(refused.headers["retry-after"]) >= 1
                    assert "busy" in refused.json()["error"]["message"]
                assert (await http.get("/health")).status_code == 200
            assert {(await answer).status_code for answer in taken} == {200}
            await until(http, busy, 0)
            accepted = await http.post("/v1/chat/completions", json=chat(WORDS, 1, stream=False))
            assert accepted.status_code == 200
    finally:
        server.stop()


async def open_stream(stack: AsyncExitStack, http: httpx.AsyncClient, tokens: int) -> Stream:
    """A stream whose first word has come."""
    request = http.stream("POST", "/v1/chat/completions", json=chat(WORDS, tokens))
    stream = Stream(await stack.enter_async_context(request))
    assert stream.status == 200
    await stream.first_word()
    return stream


async def test_a_frontend_that_leaves_finishes_streams_until_it_is_told_to_hurry(
    engines: dict[str, int], frontend: HttpServer, http: httpx.AsyncClient
) -> None:
    """The last test of this frontend."""
    await until(http, reports_work, 0)  # or what is over may outweigh what is about to begin
    async with AsyncExitStack() as streams:
        long = await open_stream(streams, http, 3500)
        with paused(*engines.values()):
            views = (await http.get("/mmrouter/workers")).json()
            (idle,) = (view["worker_id"] for view in views if view["ranks"] and not active(view))
            os.kill(engines[idle], signal.SIGCONT)
            short = await open_stream(streams, http, 50)
            frontend.signal(signal.SIGTERM)
            await short.end()
            assert short.finish_reason == "length" and short.error is None
            # Refused, or cut off if it was in the queue.
            with pytest.raises((httpx.NetworkError, httpx.RemoteProtocolError)):
                async with asyncio.timeout(30), httpx.AsyncClient(base_url=frontend.url) as other:
                    while True:
                        assert (await other.get("/health")).status_code == 503
            frontend.signal(signal.SIGTERM)
            await long.end()
        assert long.finish_reason is None
        assert long.error is not None and "shutting down" in long.error["message"]
    assert await asyncio.to_thread(frontend.wait) == 0, frontend.tail()
    assert not shared_memory_of(frontend.pid)


async def test_a_rolling_restart_of_all_workers_under_load_loses_no_request(
    stack: Stack, router: Endpoint
) -> None:
    """Clients stream answers about pictures all the time, while each worker in turn is asked
    to leave and another is started in its place."""
    prompts = [
        {"role": "user", "content": [image(data_uri(picture(f"rolling-{n}"))), words("What?")]}
        for n in range(PROMPTS)
    ]
    answers: list[tuple[int, Stream]] = []
    enough = asyncio.Event()

    async def client(http: httpx.AsyncClient, first: int) -> None:
        for number in itertools.count(first):
            if enough.is_set():
                return
            which = number % len(prompts)
            body = chat(prompts[which], 40)
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                stream = Stream(response)
                answers.append((which, stream))
                await stream.end()
            await asyncio.sleep(PAUSE_S)

    async with (
        httpx.AsyncClient(base_url=router.url, timeout=120) as http,
        asyncio.TaskGroup() as group,
    ):
        for first in range(CLIENTS):
            group.create_task(client(http, first))
        for name, worker in list(stack.workers.items()):
            worker.signal(signal.SIGTERM)
            assert await asyncio.to_thread(worker.wait) == 0, worker.tail()
            stack.workers[name] = start_worker(name, stack.model, stack.discovery, stack.logs)
            await asyncio.to_thread(wait_for_workers, stack.frontend, list(stack.workers.values()))
        await eventually(lambda: len(answers) > 2 * PROMPTS)
        enough.set()

    for _, stream in answers:
        assert (stream.status, stream.error, stream.finish_reason) == (200, None, "length")
    for which in range(len(prompts)):
        assert len({stream.text for number, stream in answers if number == which}) == 1

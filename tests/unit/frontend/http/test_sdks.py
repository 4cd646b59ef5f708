"""OpenAI's and Anthropic's SDKs at the middlewares that refuse: which exception a user gets, that
they come back when they were told to, and how each shows its key."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from fastapi import FastAPI

from common.errors import NoWorkerError
from frontend.asgi import App, Door, Message, Receive, Scope, Send, unanswered
from frontend.http.access.api_keys import ApiKeyGuard, Keys
from frontend.http.error_shapes import say_when_to_retry
from frontend.http.limits.admission import Admission
from frontend.http.server.readiness_gate import ReadinessGate
from frontend.http.settings import HttpSettings
from tests.unit.frontend.http.serving import serving
from tests.waiting import until

CHAT = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "demo",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
    ],
}
MESSAGE = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "model": "demo",
    "content": [{"type": "text", "text": "hello"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
HELLO: Any = [{"role": "user", "content": "hello"}]


class Desk:
    """An app that answers once it may."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.asked = 0
        self.free = asyncio.Event()

        @self.app.post("/v1/chat/completions")
        async def chat() -> object:
            return await self._answer(CHAT)

        @self.app.post("/v1/messages")
        async def messages() -> object:
            return await self._answer(MESSAGE)

    async def _answer(self, answer: object) -> object:
        self.asked += 1
        await self.free.wait()
        return answer


class Refusals:
    """Middleware that counts them."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch(message: Message) -> None:
            await send(message)
            self.count += message.get("status") in (429, 503)

        await self._app(scope, receive, watch)


@dataclass(frozen=True)
class Sdk:
    """One of the two.

    Attributes:
        ask: port, key and retries; one question.
    """

    ask: Callable[[int, str, int], Any]
    errors: Any


async def by_openai(port: int, key: str, retries: int) -> str | None:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=retries
    ) as client:
        reply = await client.chat.completions.create(model="demo", messages=HELLO)
        return reply.choices[0].message.content


async def by_anthropic(port: int, key: str, retries: int) -> str:
    async with anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{port}", auth_token=key, max_retries=retries
    ) as client:
        reply = await client.messages.create(model="demo", messages=HELLO, max_tokens=1)
        return str(reply.content[0].text)  # type: ignore[union-attr] # a text block


SDKS = pytest.mark.parametrize(
    "sdk", [Sdk(by_openai, openai), Sdk(by_anthropic, anthropic)], ids=["openai", "anthropic"]
)


@SDKS
async def test_it_is_told_to_come_back_and_does_when_there_is_room(sdk: Sdk) -> None:
    desk = Desk()
    refusals = Refusals(
        Door(desk.app, [say_when_to_retry, Admission(HttpSettings(max_inflight=1))])
    )
    async with serving(refusals, HttpSettings()) as served:
        busy = asyncio.create_task(sdk.ask(served.port, "none", 0))
        await until(lambda: desk.asked)
        with pytest.raises(sdk.errors.RateLimitError) as refused:
            await sdk.ask(served.port, "none", 0)
        assert refused.value.status_code == 429
        assert refused.value.response.headers["retry-after"] == "1"
        patient = asyncio.create_task(sdk.ask(served.port, "none", 20))
        await until(lambda: refusals.count > 1)
        desk.free.set()
        assert [await busy, await patient] == ["hello", "hello"]


@SDKS
async def test_it_waits_for_the_first_worker(sdk: Sdk) -> None:
    def nobody() -> None:
        raise NoWorkerError("no worker is available")

    desk = Desk()
    desk.free.set()
    gate = ReadinessGate(nobody)
    refusals = Refusals(Door(unanswered, [say_when_to_retry, gate]))
    async with serving(refusals, HttpSettings()) as served:
        with pytest.raises(sdk.errors.InternalServerError, match="no worker is available") as error:
            await sdk.ask(served.port, "none", 0)
        assert error.value.status_code == 503
        patient = asyncio.create_task(sdk.ask(served.port, "none", 20))
        await until(lambda: refusals.count > 1)
        gate.let_in(desk.app)
        assert await patient == "hello"


@SDKS
async def test_it_shows_its_key(sdk: Sdk) -> None:
    desk = Desk()
    desk.free.set()
    async with serving(Door(desk.app, [ApiKeyGuard(Keys(["sesam"]))]), HttpSettings()) as served:
        assert await sdk.ask(served.port, "sesam", 0) == "hello"
        with pytest.raises(sdk.errors.AuthenticationError):
            await sdk.ask(served.port, "another", 0)


async def test_anthropics_other_way_to_show_a_key_works_too() -> None:
    desk = Desk()
    desk.free.set()
    async with (
        serving(Door(desk.app, [ApiKeyGuard(Keys(["sesam"]))]), HttpSettings()) as served,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{served.port}", api_key="sesam", max_retries=0
        ) as client,
    ):
        reply = await client.messages.create(model="demo", messages=HELLO, max_tokens=1)
        assert reply.stop_reason == "end_turn"

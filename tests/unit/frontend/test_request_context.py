"""The salt of a request is known from when its body is parsed, and to it alone."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from starlette.requests import Request

from common.errors import SaltLostError
from common.identity import MmHash
from common.media.cache_partition import SHARED, hash_within, partition_of
from frontend.args import parse
from frontend.asgi import App, Door, Step
from frontend.gate import BodyGate, take_parsed_bodies
from frontend.http.access.api_keys import ApiKeyGuard, Keys
from frontend.http.limits.admission import Admission
from frontend.http.settings import HttpSettings
from frontend.request_context import current_context, current_partition, salt_of_blocks
from tests.unit.frontend.http.asking import asking


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    monkeypatch.setattr(Request, "json", Request.json)  # put back afterwards
    take_parsed_bodies()
    app = FastAPI()

    @app.post("/parsed")
    async def parsed(body: dict[str, Any]) -> list[str | None]:
        """As vLLM's routes: it works in a task of its own."""

        async def work() -> list[str | None]:
            await asyncio.sleep(0)
            return [current_context().salt, current_partition()]

        return await asyncio.create_task(work())

    @app.post("/raw")
    async def raw(request: Request) -> list[str | None]:
        """As ``/invocations``."""
        await request.json()
        return [current_context().salt, current_partition()]

    @app.get("/none")
    async def none() -> list[str | None]:
        return [current_context().salt, current_partition()]

    return app


def client(app: App, key: str = "", *steps: Step) -> httpx.AsyncClient:
    steps = (*steps, Admission(HttpSettings()), BodyGate(max_choices=1))
    transport = httpx.ASGITransport(Door(app, steps))
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers)


@pytest_asyncio.fixture
async def http(app: App) -> AsyncIterator[httpx.AsyncClient]:
    async with client(app) as http:
        yield http


@pytest.mark.parametrize("path", ["/parsed", "/raw"])
async def test_a_body_names_its_salt(http: httpx.AsyncClient, path: str) -> None:
    reply = await http.post(path, json={"cache_salt": "pepper"})
    assert reply.json() == ["pepper", partition_of("pepper")]
    assert (await http.post(path, json={"pad": "x"})).json() == [None, SHARED]
    assert (await http.get("/none")).json() == [None, SHARED]


@pytest.mark.parametrize("salt", [1, None, True])
async def test_what_is_no_salt_is_left_to_vllm(http: httpx.AsyncClient, salt: object) -> None:
    assert (await http.post("/parsed", json={"cache_salt": salt})).json() == [None, SHARED]


async def test_requests_at_the_same_time_keep_their_own(http: httpx.AsyncClient) -> None:
    salts = [f"salt {n}" for n in range(20)]
    replies = await asyncio.gather(
        *(http.post("/parsed", json={"cache_salt": salt}) for salt in salts)
    )
    assert [reply.json()[0] for reply in replies] == salts


async def test_isolated_keys_share_no_partition(app: App) -> None:
    async def partitions(*, isolate: bool) -> dict[tuple[str, str | None], str]:
        found = {}
        for key in ("one", "two"):
            guard = ApiKeyGuard(Keys(["one", "two"]), isolate=isolate)
            async with client(app, key, guard) as http:
                for salt in (None, "pepper"):
                    reply = await http.post("/parsed", json={"cache_salt": salt})
                    found[key, salt] = reply.json()[1]
        return found

    together = await partitions(isolate=False)
    assert together["one", None] == together["two", None] == SHARED
    assert together["one", "pepper"] == together["two", "pepper"] == partition_of("pepper")
    apart = await partitions(isolate=True)
    assert len({*apart.values(), *together.values()}) == 6


def test_blocks_are_salted_with_what_media_are_kept_under() -> None:
    assert salt_of_blocks(None) is None
    with asking(salt="pepper", key="me"):
        assert salt_of_blocks("pepper") == "pepper"
        assert salt_of_blocks(None) is None  # a route that knows no salts
        with pytest.raises(SaltLostError):
            salt_of_blocks("salt")
    with pytest.raises(SaltLostError):
        salt_of_blocks("pepper")
    with asking(key="me", apart=True):
        assert salt_of_blocks(None) == current_partition() != SHARED
        mine = salt_of_blocks(None)
    with asking(key="you", apart=True):
        assert salt_of_blocks(None) != mine


def test_partitions_are_told_apart() -> None:
    pairs = [("a", ""), ("", "a"), ("a", "b"), ("b", "a"), ("\ud800", "")]
    assert len({partition_of(salt, owner) for salt, owner in pairs}) == len(pairs)
    assert partition_of(None) == partition_of("") == SHARED
    h = MmHash("h")
    assert hash_within(h, SHARED) == h
    assert len({h, hash_within(h, partition_of("a")), hash_within(h, partition_of("b"))}) == 3


def test_isolation_takes_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not parse(["--api-key", "a"]).isolate_api_keys
    assert parse(["--api-key", "a", "--isolate-api-keys"]).isolate_api_keys
    monkeypatch.setenv("MMROUTER_ISOLATE_API_KEYS", "1")
    assert parse(["--api-key", "a"]).isolate_api_keys
    with pytest.raises(SystemExit):
        parse([])
    assert "--api-key" in capsys.readouterr().err

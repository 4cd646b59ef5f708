"""Bodies reach an app parsed, once, and only if they were judged."""

import asyncio
import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import Request

from common.errors import RequestRejectedError
from frontend import asgi
from frontend.asgi import Door
from frontend.gate import BodyGate, body_gate, body_of, take_parsed_bodies
from frontend.gate.body_gate import DECODER, MAX_BRACKETS, MAX_COMMAS, TURN_BYTES, read
from frontend.http.limits.admission import Admission
from frontend.http.settings import HttpSettings
from frontend.request_context import current_context

JSON = {"Content-Type": "application/json"}
PAD = "x" * (1 << 20)


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> Iterator[TestClient]:
    monkeypatch.setattr(Request, "json", Request.json)  # put back afterwards
    monkeypatch.setattr(Request, "form", Request.form)
    take_parsed_bodies()
    app = FastAPI()

    @app.post("/parsed")
    async def parsed(body: dict[str, Any]) -> None:
        seen.append((body, current_context().salt))

    @app.post("/raw")
    async def raw(request: Request) -> None:
        """As ``/invocations``."""
        seen.append((await request.json(), current_context().salt))

    door = Door(app, [Admission(HttpSettings()), BodyGate(max_choices=4)])
    with TestClient(door, raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("pad", ["", PAD], ids=["small", "large"])
@pytest.mark.parametrize("path", ["/parsed", "/raw"])
def test_a_body_arrives_as_it_was(client: TestClient, seen: list[Any], path: str, pad: str) -> None:
    body = {
        "text": "naïve \u2028 \U0001f600", "number": 1.5, "big": 2**70, "none": None, "l": [1],
        "cache_salt": "pepper", "messages": [pad],
    }  # fmt: skip
    assert client.post(path, json=body).status_code == 200
    assert seen == [(body, "pepper")]


async def test_a_body_goes_with_its_request() -> None:
    """And not with its connection, which may stay."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(body_of(scope))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"[1]"}

    async def send(message: Any) -> None: ...

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"3")]}
    await Door(app, [Admission(HttpSettings()), BodyGate(max_choices=4)])(scope, receive, send)
    assert (seen, body_of(scope)) == ([[1]], None)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_other_encodings_are_judged_too(client: TestClient, seen: list[Any], encoding: str) -> None:
    def ask(body: object) -> int:
        return client.post(
            "/raw", content=json.dumps(body).encode(encoding), headers=JSON
        ).status_code

    assert ask({"a": 1}) == 200
    assert seen == [({"a": 1}, None)]
    assert ask({"n": 5}) == 400


@pytest.mark.parametrize("path", ["/parsed", "/raw"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "", "multipart/x", "bad"])
def test_nothing_gets_past_the_gate(
    client: TestClient, seen: list[Any], path: str, kind: str
) -> None:
    reply = client.post(path, content=json.dumps({"n": 5}), headers={"Content-Type": kind})
    assert reply.status_code >= 400
    assert seen == []


def test_what_is_refused_is_told_in_vllms_shape(client: TestClient) -> None:
    reply = client.post("/parsed", json={"n": 5})
    assert reply.status_code == 400
    assert "--max-choices" in reply.json()["error"]["message"]


@pytest.mark.parametrize("content", ['{"a": }', "", "{", '{"a":1}{"b":2}'])
def test_what_is_no_json_is_told_by_the_app(client: TestClient, content: str) -> None:
    reply = client.post("/parsed", content=content, headers=JSON)
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["type"] in ("json_invalid", "missing")


def test_what_only_python_takes_is_taken() -> None:
    assert math.isnan(read(b'{"a": NaN}')["a"])


@pytest.mark.parametrize("text", [b'"\\ud83d"', b'{"a\\udfff": 1}', b'{"a": [NaN, "b\\ud800c"]}'])
def test_half_of_a_surrogate_pair_is_refused(text: bytes) -> None:
    """vLLM answers 500 where it repeats one, as in the first event of a response."""
    with pytest.raises(RequestRejectedError, match="half of a surrogate pair"):
        read(text)
    assert read(b'"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.parametrize("path", ["/parsed", "/raw"])
@pytest.mark.parametrize(
    "content",
    [
        b'{"n": 5, "a": "\xed\xa0\x80"}',
        b'{"n": 5, "a": "\xff"}',
        '{"n": 5}'.encode("utf-16")[:-1],
        b'{"n": 5, "a": ' + b"9" * 5000 + b"}",
    ],
    ids=["surrogate", "no UTF-8", "half of UTF-16", "long number"],
)
def test_what_one_parser_refuses_no_other_reads(
    client: TestClient, seen: list[Any], path: str, content: bytes
) -> None:
    """Python's parser takes surrogates that msgspec does not: what it read was never judged."""
    assert client.post(path, content=content, headers=JSON).status_code == 400
    assert seen == []


def test_floats_are_left_to_python_whose_cost_does_not_depend_on_them() -> None:
    """msgspec takes 30 times as long for a number like 1e308 as for any other, and refuses 1e400,
    for which a body is parsed twice: neither is asked.
    """
    assert DECODER.float_hook is float
    assert read(b"[1e308, 2.5e-308, 1e400, -1e400]") == [1e308, 2.5e-308, math.inf, -math.inf]


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000],
    ids=["lists", "objects"],
)
def test_what_is_nested_beyond_a_parser_is_refused(body: bytes) -> None:
    with pytest.raises(RequestRejectedError, match="nested too deeply"):
        read(body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" + b"{}," * MAX_BRACKETS + b"{}]", "lists and objects"),
        (b"[" + b"1," * (MAX_COMMAS + 1) + b"1]", "values"),
    ],
)
def test_what_would_become_too_many_objects_is_not_parsed(body: bytes, said: str) -> None:
    with pytest.raises(RequestRejectedError, match=said):
        read(body)


@pytest.mark.parametrize(("size", "turns"), [(TURN_BYTES, 20), (TURN_BYTES - 1, 1)])
async def test_large_bodies_are_judged_in_turns_of_the_event_loop(
    size: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 bodies of 60 KB in one turn kept others waiting for 4 s."""
    monkeypatch.setattr(asgi, "ENTRIES", 20)
    turn = 0
    seen: set[int] = set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.add(turn)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b" " * (size - 2) + b"{}"}

    async def send(message: Any) -> None: ...

    async def count() -> None:
        nonlocal turn
        while len(seen) < turns or turn < turns:
            await asyncio.sleep(0)
            turn += 1

    door = Door(app, [Admission(HttpSettings()), BodyGate(max_choices=4)])
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/raw",
        "headers": [(b"content-length", b"9")],
    }
    await asyncio.gather(count(), *(door(dict(scope), receive, send) for _ in range(20)))
    assert len(seen) == turns


async def test_slow_bodies_have_half_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer needs some 25 turns, and each of them had the body of another request."""
    now, turn, waited = 0.0, asyncio.sleep, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        waited.append(seconds)
        await turn(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal now
        now += 0.25

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b" " * TURN_BYTES + b"{}"}

    async def send(message: Any) -> None: ...

    monkeypatch.setattr(asyncio, "sleep", sleep)
    clock = SimpleNamespace(monotonic=lambda: now, thread_time=lambda: now)
    monkeypatch.setattr(body_gate, "time", clock)
    door = Door(app, [Admission(HttpSettings()), BodyGate(max_choices=4)])
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"9")]}
    await asyncio.gather(*(door(dict(scope), receive, send) for _ in range(3)))
    assert [seconds for seconds in waited if seconds] == [0.25, 0.25]

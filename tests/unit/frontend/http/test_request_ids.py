"""Each request has an id and, if it asks for work, a span; whatever its client says or does."""

import asyncio
import logging
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI, HTTPException

from common.observability.log_lines import LogFormat, LogLevel, LogSetup, current_request
from common.observability.telemetry import stage
from frontend.asgi import App, Door, Message, Scope
from frontend.http.server.request_ids import name_request, trace
from frontend.request.spans import new_request_id
from tests.fakes.spans import Recorded, recorded_spans

CLIENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with recorded_spans() as recorded:
        yield recorded


def app() -> App:
    made = FastAPI()

    @made.post("/v1/chat/{kind}")
    async def chat(kind: str) -> list[str]:
        with stage("fetch"):
            await asyncio.sleep(0)
        if kind == "broken":
            raise HTTPException(503)
        return [new_request_id(), new_request_id(), current_request.get()]

    @made.get("/health")
    async def health() -> str:
        return current_request.get()

    return Door(made, [name_request, trace])


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app()), base_url="http://frontend")


async def test_ids(recorded: Recorded) -> None:
    async with client() as http:
        answers = [(await http.post("/v1/chat/x")).json() for _ in range(3)]
        assert len((await http.get("/health")).json()) == 32
    for first, second, current in answers:
        assert (first, second) == (current, f"{current}.1")
    assert len({current for _, _, current in answers}) == 3


async def test_a_span_by_its_route_and_not_by_its_path(recorded: Recorded) -> None:
    async with client() as http:
        await http.post("/v1/chat/canary?canary=1", headers={"traceparent": CLIENT})
        await http.get("/health", headers={"traceparent": CLIENT})
        await http.post("/canary")
        await http.post("/v1/chat/broken")
    assert recorded.names == [
        "fetch",
        "POST /v1/chat/{kind}",
        "POST unknown route",
        "fetch",
        "POST /v1/chat/{kind}",
    ]
    good, unknown, broken = (span for span in recorded.spans if span.name != "fetch")
    assert good.parent is not None and f"{good.parent.trace_id:032x}" == "a" * 32
    assert unknown.parent is None and unknown.attributes is not None
    assert unknown.attributes["http.response.status_code"] == 404 and unknown.status.is_unset
    assert broken.attributes is not None and broken.attributes["error.type"] == "503"
    assert "canary" not in str([span.to_json() for span in recorded.spans])


@pytest.mark.parametrize("parent", ["", "canary", "00-" + "a" * 100_000, CLIENT + ",canary"])
async def test_what_a_client_says_of_its_trace_never_harms(recorded: Recorded, parent: str) -> None:
    state = "canary=" + "x" * 10_000
    async with client() as http:
        reply = await http.post(
            "/v1/chat/x", headers={"traceparent": parent, "tracestate": state, "baggage": state}
        )
    assert reply.status_code == 200
    assert recorded.one("POST /v1/chat/{kind}").parent is None


async def test_one_that_is_never_answered_says_so(recorded: Recorded) -> None:
    async def silent(scope: Scope, receive: object, send: object) -> None:
        """The client has gone."""

    async def send(message: Message) -> None:
        """Nobody is there."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    await Door(silent, [trace])(scope, receive, send)
    assert recorded.one("POST unknown route").attributes is not None
    assert (recorded.one("POST unknown route").attributes or {})["error.type"] == "no answer"


@pytest.mark.parametrize("form", list(LogFormat))
async def test_lines_about_a_request_have_its_id(
    recorded: Recorded,
    form: LogFormat,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = LogSetup(LogLevel.DEBUG, form, "frontend").formatter()
    monkeypatch.setattr(caplog.handler, "formatter", lines)
    with caplog.at_level(logging.DEBUG, "mmrouter"):
        async with client() as http:
            _, _, request = (await http.post("/v1/chat/x")).json()
    (line,) = [line for line in caplog.text.splitlines() if "fetch took" in line]
    assert request in line
    assert (f"{next(iter(recorded.traces())):032x}" in line) == (form is LogFormat.JSON)

import httpx
import pytest
import vllm
from fastapi import FastAPI

from common.errors import NoWorkerError
from frontend.asgi import Door, unanswered
from frontend.http.operator.app import operator_app
from frontend.http.server.readiness_gate import ReadinessGate


def nobody() -> None:
    raise NoWorkerError("no worker is available: none has registered yet")


def somebody() -> None:
    pass


async def get(gate: ReadinessGate, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(Door(unanswered, [gate]))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        return await client.get(path)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/whatever"])
async def test_closed_it_answers_503_with_the_reason(path: str) -> None:
    reply = await get(ReadinessGate(nobody), path)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    error = reply.json()["error"]
    assert error["code"] == 503 and "none has registered" in error["message"]


async def test_closed_it_tells_the_version() -> None:
    gate = ReadinessGate(nobody, operator_app([], ""))
    reply = await get(gate, "/version")
    assert reply.status_code == 200
    assert reply.json() == {"version": vllm.__version__}
    assert (await get(gate, "/ping")).status_code == 503


async def test_while_the_model_is_loaded_it_says_so() -> None:
    reply = await get(ReadinessGate(somebody), "/health")
    assert reply.status_code == 503
    assert "being loaded" in reply.json()["error"]["message"]


async def test_open_it_is_the_app_until_there_is_none() -> None:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "fine"

    gate = ReadinessGate(somebody)
    gate.let_in(app)
    assert (await get(gate, "/health")).json() == "fine"
    gate.let_in(None)
    assert (await get(gate, "/health")).status_code == 503


async def test_closed_for_good_it_answers_503_and_ends_connections() -> None:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "fine"

    gate = ReadinessGate(somebody)
    gate.let_in(app)
    gate.close_for_good()
    reply = await get(gate, "/health")
    assert reply.status_code == 503
    assert reply.headers["connection"] == "close"
    assert "shutting down" in reply.json()["error"]["message"]

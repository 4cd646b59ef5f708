"""Whatever is looked for by name and is not there: an error of which clients show the words."""

from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from vllm.entrypoints.launchers.app import build_app

from frontend.args import parse
from frontend.http.operator.app import operator_app
from frontend.http.server.not_found import (
    STORED,
    look_up_models,
    look_up_responses,
    say_what_there_is,
)
from frontend.http.server.vllm_server import _handle_errors

CARDS = {"object": "list", "data": [{"id": "demo", "object": "model"}, {"id": "org/other"}]}


def client(tasks: tuple[str, ...] = ("generate",)) -> httpx.AsyncClient:
    app = build_app(parse([]).serve, tasks, None)
    before = {getattr(route, "path", "") for route in app.routes}
    assert before.issuperset(STORED) == ("generate" in tasks)

    async def listing() -> dict[str, Any]:
        return CARDS

    look_up_models(app, listing)
    look_up_models(app, listing)  # as with several models
    look_up_responses(app)
    _handle_errors(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://f")


@pytest.mark.parametrize("status", [404, 529])
async def test_an_error_of_a_middleware_keeps_its_status(status: int) -> None:
    """Python has no name for 529."""

    async def refuse() -> None:
        raise HTTPException(status, "later")

    models = FastAPI(exception_handlers={HTTPException: say_what_there_is})
    for app in (models, operator_app([], "")):
        app.add_api_route("/work", refuse)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
            answer = await http.get("/work")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)


async def test_a_model_is_found_by_its_name() -> None:
    async with (
        client() as http,
        openai.AsyncOpenAI(
            api_key="none",
            base_url="http://f/v1",
            http_client=http,  # type: ignore[arg-type] # also takes this httpx
            max_retries=0,
        ) as sdk,
    ):
        assert (await sdk.models.retrieve("demo")).id == "demo"
        assert (await sdk.models.retrieve("org/other")).id == "org/other"
        with pytest.raises(openai.NotFoundError, match="`nobody` does not exist: there are demo"):
            await sdk.models.retrieve("nobody")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_answer_is_never_stored(method: str) -> None:
    async with client() as http:
        replies = [
            await http.request(method, "/v1/responses/resp_1"),
            await http.post("/v1/responses/resp_1/cancel"),
        ]
    for reply in replies:
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert "not stored" in error["message"] and "`resp_1`" in error["message"]
        assert (error["param"], error["code"]) == ("response_id", 404)


async def test_a_route_that_is_not_there_says_what_is() -> None:
    async with client() as http:
        missing = await http.post("/v1/embeddings", json={})
        wrong = await http.get("/v1/chat/completions")
        counted = await http.post("/v1/responses/input_tokens", json={})
    error = missing.json()["error"]
    assert (missing.status_code, error["code"], error["type"]) == (404, 404, "NotFoundError")
    assert "no POST /v1/embeddings" in error["message"]
    assert "chats (/v1/chat/completions)" in error["message"]
    assert "embeddings (" not in error["message"]
    assert counted.status_code == 404
    assert "no POST /v1/responses/input_tokens" in counted.json()["error"]["message"]
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "Method Not Allowed"

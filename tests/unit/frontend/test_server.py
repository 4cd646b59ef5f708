"""Requests over which vLLM's own code stumbles are bad requests, not failures of ours."""

from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI, Request
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from frontend.server import _blame_the_request, _handle


def stumble(request: Request) -> None:
    # Looks for "get" in a number before it is known that it is one.
    CompletionRequest.model_validate({"model": "m", "prompt": "x", "structured_outputs": 7})


def fail(request: Request) -> None:
    {}["a bug of ours"]


@pytest.mark.parametrize(("work", "status"), [(stumble, 400), (fail, 500)])
async def test_who_is_to_blame(work: Callable[[Request], None], status: int) -> None:
    app = FastAPI()
    app.add_api_route("/", work)
    # As vLLM's SageMaker support leaves it: assembled before our handlers come.
    app.middleware_stack = app.build_middleware_stack()
    for kind in (AttributeError, KeyError):
        _handle(app, kind, _blame_the_request)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = await http.get("/")
    assert reply.status_code == status
    assert status == 500 or "can't be" in reply.json()["error"]["message"]

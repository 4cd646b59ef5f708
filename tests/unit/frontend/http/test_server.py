"""Requests over which vLLM's own code stumbles are bad requests, not failures of ours."""

import errno
import gc
import json
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMValidationError

from frontend.asgi import blaming_a_lack_of_files
from frontend.http.server.vllm_server import _handle_errors


class Empty(BaseModel):
    """An item without fields."""


def stumble(request: Request) -> None:
    # Looks for "get" in a number before it is known that it is one.
    CompletionRequest.model_validate({"model": "m", "prompt": "x", "structured_outputs": 7})


def sink(request: Request) -> None:
    # As the arguments of a tool call are read, a string in the body.
    json.loads("[" * 400_000 + "]" * 400_000)


def miss(request: Request) -> None:
    """As the text of an item that has none, for which Pydantic raises the error itself."""
    source = "def read(item): return item.text"
    names: dict[str, Any] = {}
    exec(compile(source, "/site/vllm/entrypoints/openai/responses/protocol.py", "exec"), names)
    names["read"](Empty())


def fail(request: Request) -> None:
    raise KeyError("a bug of ours")


async def get(work: Callable[..., object]) -> httpx.Response:
    """What an app answers whose only route does this."""
    app = FastAPI()
    app.add_api_route("/", work)
    # As vLLM's SageMaker support leaves it: assembled before our handlers come.
    app.middleware_stack = app.build_middleware_stack()
    _handle_errors(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.get("/")


@pytest.mark.parametrize(
    ("work", "status", "said"),
    [
        (stumble, 400, "can't be"),
        (miss, 400, "no attribute 'text'"),
        (sink, 400, "nested too deep"),
        (fail, 500, ""),
    ],
)
async def test_who_is_to_blame(work: Callable[[Request], None], status: int, said: str) -> None:
    reply = await get(work)
    assert reply.status_code == status
    assert said in reply.text


@pytest.mark.parametrize(
    ("number", "status", "after"), [(errno.EMFILE, 503, "1"), (errno.EACCES, 500, None)]
)
async def test_a_frontend_without_file_handles_says_when_to_come_back(
    number: int, status: int, after: str | None
) -> None:
    """As when a first answer imports what it needs. The path of a file is nobody's business."""

    def work(request: Request) -> None:
        raise OSError(number, "Too many open files", "/srv/venv/module.py")

    def read(request: Request) -> None:
        """As vLLM's reader of pictures does."""
        with blaming_a_lack_of_files():
            try:
                work(request)
            except OSError as error:
                raise ValueError(f"Failed to load image: {error}") from error

    def start(request: Request) -> None:
        raise RuntimeError("can't start new thread" if status == 503 else "dead")

    for each in (work, read, start):
        reply = await get(each)
        assert (reply.status_code, reply.headers.get("retry-after")) == (status, after)
        assert "/srv" not in reply.text


async def test_a_frontend_without_memory_says_when_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(request: Request) -> None:
        raise MemoryError

    def decode(request: Request) -> None:
        """As for a picture that claims to be large."""
        raise VLLMValidationError("too large") from MemoryError()

    def fill(item: Empty) -> None:
        """FastAPI reads the item, and catches what its reader raises."""

    monkeypatch.setattr(Request, "body", work)
    statuses = [(await get(each)).status_code for each in (work, fill, decode)]
    assert [status == HTTPStatus.SERVICE_UNAVAILABLE for status in statuses] == [True, True, False]


class Medium:
    """Something that a request holds."""


@pytest.mark.parametrize("error", [KeyError, ValueError, VLLMValidationError])
async def test_a_request_that_failed_holds_nothing(error: type[Exception]) -> None:
    """Although vLLM's own wrapper makes a cycle of it."""
    held: list[weakref.ref[Medium]] = []

    async def work(raw_request: Request) -> None:
        medium = Medium()
        held.append(weakref.ref(medium))
        raise error("no")

    gc.disable()
    try:
        reply = await get(with_cancellation(work))
        assert reply.status_code >= 400
        assert held[0]() is None
    finally:
        gc.enable()

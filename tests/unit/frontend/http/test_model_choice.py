"""Which app a request goes to, where one endpoint serves several models."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from frontend.asgi import Door, Receive, Scope, Send
from frontend.gate import BodyGate
from frontend.http.limits.admission import Admission
from frontend.http.server.model_choice import ModelApp, ModelChoice
from frontend.http.settings import HttpSettings
from frontend.request_context import current_context
from tests.waiting import until

JSON = {"content-type": "application/json"}


def door_to(choice: ModelChoice) -> Door:
    return Door(choice, [Admission(HttpSettings()), BodyGate(max_choices=1)])


class Said:
    """Says who was asked, and the body that came."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: asyncio.Event | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        if self.waits is not None:
            await self.waits.wait()
        said = {"app": self.name, "size": len(body), "defers": current_context().defers}
        await JSONResponse(said)(scope, receive, send)


def model_app(name: str, *adapters: str, there: bool = True) -> ModelApp:
    alpha = name == "alpha"
    return ModelApp(
        [name, f"{name}-too"],
        adapters,
        Said(name),
        lambda: there,
        alpha,
        lambda scope: scope["path"] != ("/v1/embeddings" if alpha else "/v1/chat/completions"),
    )


@pytest.fixture
def choice() -> ModelChoice:
    made = ModelChoice(lambda name: name == "coming")
    made.apps += [model_app("alpha", "fr", "beta"), model_app("beta", "fr", "de")]
    return made


@pytest.fixture
async def http(choice: ModelChoice) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(door_to(choice))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as client:
        yield client


async def asked(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


@pytest.mark.parametrize(
    ("name", "app"),
    [
        ("alpha", "alpha"),
        ("beta-too", "beta"),
        ("de", "beta"),
        ("fr", "alpha"),  # both have it: that of the first model
        ("beta", "beta"),  # a model goes before an adapter of its name
        ("nobody", "alpha"),  # whose 404 is vLLM's
    ],
)
async def test_the_name_decides(http: httpx.AsyncClient, name: str, app: str) -> None:
    body = {"messages": [{"content": "x" * 1000}], "model": name}
    said = await asked(http, **body)
    assert said["app"] == app and said["size"] == len(httpx.Request("POST", "/", json=body).content)


async def test_each_model_has_its_media_as_it_wants_them(http: httpx.AsyncClient) -> None:
    assert (await asked(http, model="alpha"))["defers"] is True
    assert (await asked(http, model="beta"))["defers"] is False


async def test_a_model_that_is_being_loaded(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"model": "coming"})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "`coming` is being loaded" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": ""}])
async def test_without_a_name_it_is_asked_for_if_there_are_several(
    http: httpx.AsyncClient, choice: ModelChoice, body: dict[str, Any]
) -> None:
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "alpha, beta" in answer.json()["error"]["message"]
    choice.apps.pop()
    assert (await http.post("/v1/completions", json=body)).json()["app"] == "alpha"


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[1]", b"null", b'{"model": 5}', b'{"model": true}', b'{"model": "alpha"', b"",
    ],
)  # fmt: skip
async def test_what_can_not_be_read_is_for_vllm_to_refuse(
    http: httpx.AsyncClient, body: bytes
) -> None:
    answer = await http.post("/v1/completions", content=body, headers=JSON)
    assert answer.json() == {"app": "alpha", "size": len(body), "defers": True}


@pytest.mark.parametrize(
    "body",
    [
        b'{"temperature": NaN, "model": "beta"}',
        json.dumps({"model": "beta"}).encode("utf-16"),
        b'{"model": "alpha", "model": "beta"}',
    ],
)
async def test_what_only_pythons_parser_takes(http: httpx.AsyncClient, body: bytes) -> None:
    answer = await http.post("/v1/completions", content=body, headers=JSON)
    assert answer.json()["app"] == "beta"


async def test_forms_say_it_too(choice: ModelChoice) -> None:
    transport = httpx.ASGITransport(door_to(choice))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        for name in ("alpha", "beta"):
            form = http.build_request(
                "POST", "/v1/audio/transcriptions", data={"model": name}, files={"file": b"\0"}
            )
            answer = await http.send(form)
            assert answer.json()["app"] == name


async def test_what_names_no_model_goes_where_somebody_is(choice: ModelChoice) -> None:
    choice.apps[:] = [model_app("alpha", there=False), model_app("beta")]
    transport = httpx.ASGITransport(door_to(choice))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        assert (await http.get("/health")).json()["app"] == "beta"
        assert (await http.post("/mmrouter/workers/w/drain")).json()["app"] == "beta"
        assert (await http.post("/pause", json={"mode": "abort"})).json()["app"] == "beta"
        choice.apps.pop()
        assert (await http.get("/health")).json()["app"] == "alpha"
        choice.apps.pop()
        assert (await http.get("/health")).status_code == 503


@pytest.mark.parametrize("there", [True, False])
async def test_a_name_that_nobody_has_goes_where_such_requests_are(there: bool) -> None:
    choice = ModelChoice(lambda _: False)
    choice.apps += [model_app("alpha", there=not there), model_app("beta", there=there)]
    transport = httpx.ASGITransport(door_to(choice))
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        for path, app in (("/v1/chat/completions", "alpha"), ("/v1/embeddings", "beta")):
            answer = await http.post(path, json={"model": "nobody"})
            assert answer.json()["app"] == app
        answer = await http.post("/elsewhere", json={"model": "nobody"})
        assert answer.json()["app"] == ("beta" if there else "alpha")


async def test_its_requests_are_counted_until_they_end(
    http: httpx.AsyncClient, choice: ModelChoice
) -> None:
    app = choice.apps[1]
    assert isinstance(app.app, Said)
    app.app.waits = asyncio.Event()
    asking = asyncio.create_task(asked(http, model="beta"))
    await until(lambda: app.requests)
    assert not app.idle.is_set()
    app.app.waits.set()
    await asking
    assert not app.requests and app.idle.is_set()

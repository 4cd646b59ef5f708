"""OpenAI's and Anthropic's clients read every error, each in its own shape."""

import json
from http import HTTPStatus

import anthropic
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from starlette.responses import StreamingResponse
from vllm.entrypoints.serve.exception_handling import utils
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

from common.errors import NoWorkerError
from frontend.args import parse
from frontend.asgi import error_answer
from frontend.door import make_door
from frontend.http.server.readiness_gate import ReadinessGate
from frontend.http.settings import HttpSettings
from tests.unit.frontend.http.serving import Reply, behind_door, post, serving, with_body

KEYS = "--api-key=sesam"
TOO_LONG = "This model's maximum context length is 8 tokens. However, your prompt contains 9."
PATH = "/v1/messages"
QUESTION = json.dumps(
    {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
).encode()


def desk() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/messages")
    async def messages() -> str:
        return "hello"

    @app.post("/v1/messages/count_tokens")
    async def count() -> Response:
        return error_answer("too long", HTTPStatus.BAD_REQUEST)

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        return error_answer(TOO_LONG, HTTPStatus.BAD_REQUEST)

    @app.post("/v1/messages/{kind}")
    async def odd(kind: str) -> Response:
        if kind == "stream":
            return StreamingResponse(iter([b"x" * (1 << 19)] * 3), 500)
        if kind == "anthropic":
            error = {"type": "BadRequestError", "message": "their own"}
            return JSONResponse({"type": "error", "error": error}, 400)
        if kind == "long":
            return error_answer(TOO_LONG, HTTPStatus.BAD_REQUEST)
        if kind == "overloaded":
            return error_answer("later", 529)
        return Response(b"[1]" if kind == "list" else b"no JSON", 502)

    return app


async def ask(head_and_body: bytes, *flags: str, max_body_mb: float = 64) -> Reply:
    settings = HttpSettings(max_body_mb=max_body_mb)
    inside = behind_door(desk(), *flags, settings=settings)
    async with serving(inside, settings) as served:
        return await served.ask(head_and_body)


def error_of(reply: Reply) -> tuple[str, str]:
    answer = json.loads(reply.body)
    assert answer["type"] == "error"
    return answer["error"]["type"], answer["error"]["message"]


async def test_a_key_in_anthropics_header() -> None:
    for name in ("x-api-key", "X-API-Key"):
        reply = await ask(with_body(QUESTION, f"{name}: sesam", path=PATH), KEYS)
        assert (reply.status, json.loads(reply.body)) == (200, "hello")
    wrong = await ask(with_body(QUESTION, "x-api-key: sesame", path=PATH), KEYS)
    assert (wrong.status, error_of(wrong)[0]) == (401, "authentication_error")


async def test_the_usual_header_goes_before_it() -> None:
    both = ("x-api-key: sesam", "Authorization: Bearer another")
    assert (await ask(with_body(QUESTION, *both, path=PATH), KEYS)).status == 401


@pytest.mark.parametrize(
    ("request_", "status", "kind", "said"),
    [
        (post("Content-Length: 9000000", path=PATH), 413, "request_too_large", "--max-body-mb"),
        (
            with_body(b"x", "Content-Encoding: gzip", path=PATH),
            415,
            "invalid_request_error",
            "Content-Encoding",
        ),
        (post(path=PATH, method="GET"), 405, "invalid_request_error", "Method Not Allowed"),
        (with_body(b"{}", path=f"{PATH}/count_tokens"), 400, "invalid_request_error", "too long"),
        (with_body(b"{}", path=f"{PATH}/anthropic"), 400, "invalid_request_error", "their own"),
        (with_body(b"{}", path=f"{PATH}/overloaded"), 529, "overloaded_error", "later"),
    ],
)
async def test_errors_are_in_anthropics_shape(
    request_: bytes, status: int, kind: str, said: str
) -> None:
    reply = await ask(request_, max_body_mb=1)
    assert (reply.status, error_of(reply)[0]) == (status, kind)
    assert said in error_of(reply)[1]


async def test_a_frontend_without_workers_says_so() -> None:
    def nobody() -> None:
        raise NoWorkerError("no worker is available")

    inside = make_door(parse([]), ReadinessGate(nobody))
    async with serving(inside, HttpSettings()) as served:
        reply = await served.ask(with_body(QUESTION, path=PATH))
        assert error_of(reply) == ("overloaded_error", "no worker is available")
        assert reply.headers["retry-after"] == "1"
        other = await served.ask(with_body(QUESTION, path="/v1/chat/completions"))
        assert json.loads(other.body)["error"]["code"] == 503


async def test_a_prompt_that_is_too_long_is_called_so_as_clients_look_for_it() -> None:
    openais = json.loads((await ask(with_body(b"{}", path="/v1/chat/completions"))).body)["error"]
    assert openais["code"] == "context_length_exceeded"
    assert (openais["message"], openais["type"]) == (TOO_LONG, "Bad Request")
    kind, said = error_of(await ask(with_body(b"{}", path=f"{PATH}/long")))
    assert (kind, said) == ("invalid_request_error", f"prompt is too long: {TOO_LONG}")


@pytest.mark.parametrize("kind", ["stream", "list", "text"])
async def test_what_is_no_error_of_ours_stays(kind: str) -> None:
    settings = HttpSettings()
    async with serving(behind_door(desk()), settings) as served:
        client = await served.connect()
        await client.send(with_body(b"{}", "Connection: close", path=f"{PATH}/{kind}"))
        answer = await client.until_closed()
    assert b'"type"' not in answer
    expected = {"stream": b"x" * (1 << 19), "list": b"[1]", "text": b"no JSON"}
    assert expected[kind] in answer


async def test_the_connection_of_a_500_is_said_to_close() -> None:
    """Since it is closed where the app raises after its answer."""
    app = FastAPI()

    @app.post("/v1/messages")
    async def messages() -> None:
        raise KeyError("no")

    settings = HttpSettings()
    async with serving(behind_door(app, settings=settings), settings) as served:
        reply = await served.ask(with_body(QUESTION, path=PATH))
    assert (reply.status, reply.headers["connection"]) == (500, "close")


async def test_anthropics_sdk_says_what_is_wrong() -> None:
    settings = HttpSettings(max_body_mb=0.001)
    inside = behind_door(desk(), KEYS, settings=settings)
    async with (
        serving(inside, settings) as served,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{served.port}", auth_token="sesam", max_retries=0
        ) as client,
    ):
        with pytest.raises(anthropic.RequestTooLargeError, match="--max-body-mb") as refused:
            await client.messages.create(
                model="demo", max_tokens=1, messages=[{"role": "user", "content": "x" * 2000}]
            )
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["error"]["type"] == "request_too_large"


def test_paths_are_sought_in_an_error_at_a_cost_that_is_linear() -> None:
    """A model's name of 8 KB stopped the event loop for 11 s; these would for months."""
    for long in ("/a" * 100_000, " " * 100_000 + 'File "'):
        said = f'No `{long}`: /a/b-c/d.py/e\n  File "/a.py", line 3, in f\n  x = y\nin /tmp/a/b'
        assert sanitize_message(said) == f"No `{long}`: <path>/e\nin <path>"


def test_a_long_error_is_cut_before_it_is_searched() -> None:
    assert utils.sanitize_message("a" * 300_000) == "a" * 262_144 + "…"
    assert utils.sanitize_message("a" * 262_144) == "a" * 262_144

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from common.errors import ConfigurationError
from frontend.args import parse
from frontend.asgi import Message, Receive, Scope, Send
from frontend.http.access.api_keys import OPEN, ApiKeyGuard, read_keys
from frontend.request_context import EVERYBODY, current_context


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("served")(scope, receive, send)


def client(guard: ApiKeyGuard) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://test")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/invocations",
        "/tokenize",
        "/mmrouter/workers",
        "/docs",
        "/",
        "/healthy",
        "//health/../v1",
    ],
)
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer other", "Basic one", "one", "Bearer one two", "Bearer é"],
)
async def test_without_a_key_nothing_is_served(path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    async with client(ApiKeyGuard(app, ["one", "two"])) as http:
        reply = await http.post(path, headers=headers)  # type: ignore[arg-type]
    assert reply.status_code == 401
    assert reply.json() == {"error": "Unauthorized"}


@pytest.mark.parametrize("authorization", ["Bearer one", "bearer two"])
async def test_either_key_opens_everything(authorization: str) -> None:
    async with client(ApiKeyGuard(app, ["one", "two"])) as http:
        for path in ("/v1/models", "/mmrouter/workers"):
            reply = await http.get(path, headers={"Authorization": authorization})
            assert reply.text == "served"


async def test_probes_scrapers_and_preflights_need_no_key() -> None:
    async with client(ApiKeyGuard(app, ["one"], "/under")) as http:
        for path in (*OPEN, "/under/health", "/metrics/"):
            assert (await http.get(path)).text == "served"
        assert (await http.options("/v1/chat/completions")).text == "served"


async def test_strangers_send_no_bodies_anywhere() -> None:
    async with client(ApiKeyGuard(app, ["one"])) as http:
        for method, path in (("POST", "/ping"), ("GET", "/health"), ("OPTIONS", "/v1/models")):
            reply = await http.request(method, path, content=b"x" * 1000)
            assert (reply.status_code, reply.headers["connection"]) == (401, "close")
            assert (await http.request(method, path)).text == "served"


async def test_a_websocket_without_a_key_is_closed() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing is read from a stranger")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    await ApiKeyGuard(app, ["one"])(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.fixture
def key_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "keys"
    path.write_text("# of the team\none\n\n  two  \n#three\n")
    path.chmod(0o600)
    yield path


def test_a_file_holds_a_key_a_line(key_file: Path) -> None:
    assert read_keys(key_file) == ["one", "two"]


def test_an_open_file_is_complained_about(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    key_file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        read_keys(key_file)
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_one_as_kubernetes_mounts_it_is_not(
    key_file: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    key_file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        read_keys(key_file)
    assert not caplog.text


@pytest.mark.parametrize("content", [b"", b"# none\n\n", b"\xff\xfe"])
def test_a_file_without_a_key_lets_nobody_in_by_mistake(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigurationError, match="keys"):
        read_keys(tmp_path / "keys")


def test_keys_of_all_sources_count(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse([]).serve.api_key is None
    assert parse(["--api-key", "zero"]).serve.api_key == ["zero"]
    args = parse(["--api-key", "zero", "--api-key-file", str(key_file)])
    assert args.serve.api_key == ["zero", "one", "two"]
    monkeypatch.setenv("MMROUTER_API_KEY_FILE", str(key_file))
    assert parse([]).serve.api_key == ["one", "two"]
    monkeypatch.setenv("VLLM_API_KEY", "env")
    assert parse([]).serve.api_key == ["env", "one", "two"]


def test_a_missing_file_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--api-key-file", str(tmp_path / "nowhere")])
    assert "can't be read" in capsys.readouterr().err


async def test_each_key_is_a_tenant_of_its_own() -> None:
    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(current_context.get().tenant)(scope, receive, send)

    async with client(ApiKeyGuard(tell, ["one", "two"])) as http:
        tenants = [
            (await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).text
            for key in ("one", "two", "one")
        ]
    assert tenants[0] == tenants[2] != tenants[1]
    assert EVERYBODY not in tenants

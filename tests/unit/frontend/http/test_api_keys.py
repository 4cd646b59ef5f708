import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from common.cli.process_settings import KeySettings, read_keys
from common.errors import ConfigurationError
from frontend.args import parse
from frontend.asgi import Door, Message, Receive, Scope, Send
from frontend.http.access.api_keys import OPEN, AccessKeys, ApiKeyGuard, Keys
from frontend.http.operator.app import PAGE
from frontend.request_context import EVERYBODY, current_context


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("served")(scope, receive, send)


def client(door: Door) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://test")


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
    async with client(Door(app, [ApiKeyGuard(Keys(["one", "two"]))])) as http:
        reply = await http.post(path, headers=headers)  # type: ignore[arg-type]
    assert reply.status_code == 401
    assert reply.json() == {"error": "Unauthorized"}


@pytest.mark.parametrize("authorization", ["Bearer one", "bearer two"])
async def test_either_key_opens_everything(authorization: str) -> None:
    async with client(Door(app, [ApiKeyGuard(Keys(["one", "two"]))])) as http:
        for path in ("/v1/models", "/mmrouter/workers"):
            reply = await http.get(path, headers={"Authorization": authorization})
            assert reply.text == "served"


async def test_probes_scrapers_and_preflights_need_no_key() -> None:
    async with client(Door(app, [ApiKeyGuard(Keys(["one"]))], root_path="/under")) as http:
        for path in (*OPEN, "/under/health", "/metrics/"):
            assert (await http.get(path)).text == "served"
        assert (await http.options("/v1/chat/completions")).text == "served"


def test_the_page_on_security_names_each_path_that_needs_no_key() -> None:
    page = (Path(__file__).parents[4] / "docs" / "security.md").read_text()
    sentence = page.partition("needs one, except ")[2].partition(" and the status page")[0]
    assert set(re.findall("`(.+?)`", sentence)) == OPEN - PAGE


async def test_strangers_send_no_bodies_anywhere() -> None:
    async with client(Door(app, [ApiKeyGuard(Keys(["one"]))])) as http:
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
    await Door(app, [], sockets=[ApiKeyGuard(Keys(["one"]))])(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.fixture
def key_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "keys"
    path.write_text("# of the team\none\n\n  two  \n#three\n")
    path.chmod(0o600)
    yield path


def test_a_file_holds_a_key_a_line(key_file: Path) -> None:
    assert read_keys(key_file)[0] == ["one", "two"]


def test_an_open_file_is_complained_about(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    key_file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        AccessKeys([], KeySettings(api_key_file=key_file))
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_one_as_kubernetes_mounts_it_is_not(
    key_file: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    key_file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        AccessKeys([], KeySettings(api_key_file=key_file))
    assert not caplog.text


@pytest.mark.parametrize("content", [b"", b"# none\n\n", b"\xff\xfe"])
def test_a_file_without_a_key_lets_nobody_in_by_mistake(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigurationError, match="keys"):
        read_keys(tmp_path / "keys")


def test_keys_of_all_sources_count(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def known(*flags: str) -> list[str]:
        keys = parse([*flags]).access.users or Keys([])
        found = [key for key in ("zero", "one", "two", "env") if key in keys]
        assert len(found) == len(keys)
        return found

    assert parse([]).access.users is None
    assert known("--api-key", "zero") == ["zero"]
    assert known("--api-key", "zero", "--api-key-file", str(key_file)) == ["zero", "one", "two"]
    monkeypatch.setenv("MMROUTER_API_KEY_FILE", str(key_file))
    assert known() == ["one", "two"]
    monkeypatch.setenv("VLLM_API_KEY", "env")
    assert known() == ["one", "two", "env"]


def test_vllms_own_check_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse keys that came later, and take the environment's for all there are."""
    monkeypatch.setenv("VLLM_API_KEY", "env")
    for flags in ([], ["--api-key", "zero"]):
        vllms = FastAPI()
        init_entrypoints_middleware(parse(flags).serve, vllms, ())
        assert all("Authentication" not in str(each) for each in vllms.user_middleware)


def test_a_missing_file_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--api-key-file", str(tmp_path / "nowhere")])
    assert "can't be read" in capsys.readouterr().err


async def test_each_key_is_a_tenant_of_its_own() -> None:
    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(current_context().tenant)(scope, receive, send)

    async with client(Door(tell, [ApiKeyGuard(Keys(["one", "two"]))])) as http:
        tenants = [
            (await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).text
            for key in ("one", "two", "one")
        ]
    assert tenants[0] == tenants[2] != tenants[1]
    assert EVERYBODY not in tenants


async def test_keys_follow_their_files(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    admins = tmp_path / "admins"
    admins.write_text("root\n")
    files = (f"--api-key-file={key_file}", f"--admin-key-file={admins}")
    access = parse(["--api-key=flag", *files]).access
    assert access.users is not None and access.admins is not None

    def replace(path: Path, text: str) -> None:
        new = tmp_path / "new"  # as Kubernetes and editors do it
        new.write_text(text)
        new.replace(path)

    async with client(Door(app, [ApiKeyGuard(access.users)])) as http:

        async def let_in(*keys: str) -> list[str]:
            return [
                key
                for key in keys
                if (await http.get("/", headers={"Authorization": f"Bearer {key}"})).is_success
            ]

        replace(key_file, "two\nthree\n")
        assert await let_in("one", "three") == ["one"], "nobody has looked"
        await access.look()
        assert await let_in("flag", "one", "two", "three") == ["flag", "two", "three"]
        for unusable in ("# nobody\n", "root\n"):
            replace(key_file, unusable)
            caplog.clear()
            await access.look()
            assert "stay as they are" in caplog.text
            assert await let_in("three", "root") == ["three"]
        await asyncio.to_thread(key_file.unlink)
        await access.look()
        assert await let_in("three")
        replace(key_file, "four\n")
        replace(admins, "boss\n")
        await access.look()
        assert await let_in("flag", "three", "four") == ["flag", "four"]
    assert "boss" in access.admins and "root" not in access.admins

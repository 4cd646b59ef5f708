"""Who gets to what: users, admins, strangers, this host, proxies and pages in browsers."""

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from frontend.args import parse
from frontend.asgi import App, Door, Receive, Scope, Send
from frontend.http.access.admin import AdminGuard, is_for_admins
from frontend.http.access.api_keys import Keys
from frontend.http.operator.vllm_routes import MANAGEMENT
from frontend.http.settings import HttpSettings
from tests.unit.frontend.http.serving import post, serving

ADMINS = ("/mmrouter/workers", "/mmrouter", "/sleep", "/v1/load_lora_adapter", "/adapters/one")
USERS = ("/v1/models", "/docs", "/metrics", "/tokenize", "/", "/mmrouters", "/v1/mmrouter")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("served")(scope, receive, send)


def guard(*, api: list[str], admin: list[str], unix: bool = False) -> Door:
    users, admins = (Keys(keys) if keys else None for keys in (api, admin))
    return Door(app, [AdminGuard(users, admins, unix_socket=unix)], root_path="/under")


async def ask(
    served: App,
    path: str,
    key: str | None = None,
    *,
    method: str = "GET",
    client: tuple[str, int] | None = ("127.0.0.1", 5),
    host: str = "127.0.0.1:8000",
    headers: dict[str, str] | None = None,
) -> int:
    shown = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def at_its_address(scope: Scope, receive: Receive, send: Send) -> None:
        await served({**scope, "server": ("10.0.0.9", 8000)}, receive, send)

    transport = httpx.ASGITransport(at_its_address, client=client)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        everything = {"Host": host} | shown | (headers or {})
        return (await http.request(method, path, headers=everything)).status_code


@pytest.mark.parametrize("prefix", ["", "/under"])
async def test_an_admin_key_opens_what_is_for_admins_and_nothing_else(prefix: str) -> None:
    served = guard(api=["user"], admin=["admin", "other"])
    for path in ADMINS:
        for method in ("GET", "POST", "DELETE"):
            assert await ask(served, prefix + path, "admin", method=method) == 200, path
            assert await ask(served, prefix + path, "user", method=method) == 403, path
            for key in (None, "", "stranger", "admin other"):
                assert await ask(served, prefix + path, key, method=method) == 401, path
    for path in set(USERS) - {"/metrics"}:
        assert await ask(served, prefix + path, "user") == 200, path
        for key in ("admin", "other", None):
            assert await ask(served, prefix + path, key) == 401, path


@pytest.mark.parametrize("prefix", ["/", "/m", "/mmrouter", "/under/"])
async def test_no_prefix_of_a_proxy_opens_what_is_for_admins(prefix: str) -> None:
    """Routes take a prefix off where a name of the path ends, or not at all."""
    behind = FastAPI(root_path=prefix)
    behind.add_api_route("/mmrouter/workers", lambda: "served")
    served = Door(behind, [AdminGuard(Keys(["user"]), Keys(["admin"]))], root_path=prefix)
    for path in ("/mmrouter/workers", f"{prefix}/mmrouter/workers", f"{prefix}mmrouter/workers"):
        assert await ask(served, path, "user") in (403, 404), path


@pytest.mark.parametrize("keys", [["admin"], []])
async def test_a_refusal_says_whether_a_key_would_help(keys: list[str]) -> None:
    transport = httpx.ASGITransport(guard(api=[], admin=keys), client=("9.9.9.9", 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        refused = await http.get("/mmrouter/workers")
    assert refused.status_code == 403
    assert ("www-authenticate" in refused.headers) == bool(keys)


async def test_an_admin_key_is_asked_for_on_loopback_too_and_without_api_keys() -> None:
    served = guard(api=[], admin=["admin"])
    for path in ADMINS:
        assert await ask(served, path, "admin", client=("9.9.9.9", 5), host="public") == 200
        for key in (None, "stranger"):
            assert await ask(served, path, key) == 403
    for path in USERS:
        assert await ask(served, path, client=("9.9.9.9", 5), host="public") == 200


@pytest.mark.parametrize(
    ("client", "host", "status"),
    [
        (("127.0.0.1", 5), "127.0.0.1:8000", 200),
        (("127.1.2.3", 5), "localhost", 200),
        (("::1", 5), "[::1]:8000", 200),
        (("::ffff:127.0.0.1", 5), "LOCALHOST:80", 200),
        (("127.0.0.1", 5), "mmrouter.localhost:8000", 200),
        (("10.0.0.5", 5), "127.0.0.1:8000", 403),
        (("::ffff:10.0.0.5", 5), "localhost", 403),
        (("nonsense", 5), "localhost", 403),
        (None, "localhost", 403),  # it left before anybody asked
        (("127.0.0.1", 5), "evil.example:8000", 403),
        (("127.0.0.1", 5), "127.0.0.1.evil.example", 403),
        (("127.0.0.1", 5), "localhost.evil.example", 403),
        (("127.0.0.1", 5), "", 403),
        (("10.0.0.9", 5), "10.0.0.9:8000", 200),  # the frontend's own
        (("10.0.0.9", 5), "localhost", 200),
        (("::ffff:10.0.0.9", 5), "[::ffff:10.0.0.9]:8000", 200),
        (("10.0.0.9", 5), "frontend.example", 403),
        (("127.0.0.1", 5), "10.0.0.9:8000", 200),
        (("10.0.0.5", 5), "10.0.0.9:8000", 403),
    ],
)
async def test_without_one_it_takes_to_come_from_here(
    client: tuple[str, int] | None, host: str, status: int
) -> None:
    for path in ADMINS:
        assert await ask(guard(api=[], admin=[]), path, client=client, host=host) == status
        locked = guard(api=["user"], admin=[])
        assert await ask(locked, path, "user", client=client, host=host) == status
        assert await ask(locked, path, client=client, host=host) == 401


@pytest.mark.parametrize("unix", [False, True])
@pytest.mark.parametrize(
    "header",
    [
        "Forwarded",
        "Via",
        "X-Real-IP",
        "X-Forwarded-For",
        "X-Forwarded-Proto",
        "X-Forwarded",
        "True-Client-IP",
        "X-Envoy-External-Address",
        "X-Original-Forwarded-For",
        "CF-Connecting-IP",
    ],
)
async def test_who_comes_through_a_proxy_is_not_taken_for_local(header: str, unix: bool) -> None:
    served = guard(api=[], admin=[], unix=unix)
    for value in ("127.0.0.1", "for=127.0.0.1", ""):
        assert await ask(served, "/mmrouter/workers", headers={header: value}) == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
async def test_pages_of_other_sites_get_nothing_through_a_local_browser(
    headers: dict[str, str], status: int
) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        served = guard(api=[], admin=[])
        assert await ask(served, "/mmrouter/workers", method=method, headers=headers) == status
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "GET"}
    locked = guard(api=["user"], admin=["admin"])
    assert await ask(locked, "/mmrouter/workers", method="OPTIONS", headers=preflight) == 403


async def test_a_unix_socket_is_local_whatever_name_it_is_called_by() -> None:
    served = guard(api=[], admin=[], unix=True)
    assert await ask(served, "/mmrouter/workers", client=None, host="anything") == 200


@pytest.mark.parametrize("path", ["//mmrouter/workers", "/mmrouter/", "/mmrouter//x", "/sleep/"])
def test_odd_spellings_are_for_admins(path: str) -> None:
    assert is_for_admins(path)


async def test_a_line_feed_leads_to_a_route_but_not_around_the_guard() -> None:
    """Starlette finds routes by a pattern that ends in ``$``, before which one may stand."""
    vllms = FastAPI()
    for path in sorted(MANAGEMENT):
        vllms.add_api_route(f"/{path}", lambda: "served", methods=["POST"])
    guarded = Door(vllms, [AdminGuard(Keys(["user"]), Keys(["admin"]))])
    async with serving(guarded, HttpSettings()) as server:
        for path in sorted(MANAGEMENT):
            head = post("Authorization: Bearer user", path=f"/{path}%0A")
            assert (await server.ask(head)).status == 403, path


@pytest.mark.parametrize(
    "target", ["/mmrouter/workers", "/%6dmrouter/workers", "/mmrouter%2fworkers"]
)
async def test_a_real_request_from_here_is_local_until_a_header_says_otherwise(target: str) -> None:
    """uvicorn puts what a local proxy says of its client in the place of the proxy's address."""
    async with serving(guard(api=[], admin=[]), HttpSettings()) as server:
        host = f"Host: 127.0.0.1:{server.port}"
        for headers, status in (
            ((), 200),
            (("X-Forwarded-For: 9.9.9.9",), 403),
            (("X-Forwarded-For: 127.0.0.1",), 403),
        ):
            head = post(*headers, path=target, method="GET").replace(b"Host: test", host.encode())
            assert (await server.ask(head)).status == status
        assert (await server.ask(post(path=target, method="GET"))).status == 403


def test_admin_keys_come_from_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "admins"
    path.write_text("# ours\none\n")
    path.chmod(0o600)
    assert parse([]).access.admins is None
    access = parse(["--admin-key-file", str(path), "--api-key", "user"]).access
    assert access.admins is not None and access.users is not None
    assert "one" in access.admins and "one" not in access.users and "user" in access.users
    monkeypatch.setenv("MMROUTER_ADMIN_KEY_FILE", str(path))
    access = parse([]).access
    assert access.admins is not None and access.users is None


def test_an_admin_key_that_users_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "admins").write_text("same\n")
    with pytest.raises(SystemExit):
        parse(["--admin-key-file", str(tmp_path / "admins"), "--api-key", "same"])
    assert "is an API key as well" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"# none\n"])
def test_a_file_without_an_admin_key_is_refused(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "admins").write_bytes(content)
    with pytest.raises(SystemExit):
        parse(["--admin-key-file", str(tmp_path / "admins")])
    assert "admin key" in capsys.readouterr().err

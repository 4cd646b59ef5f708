"""Every route of vLLM's server is served here, done by workers, or refused with a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import vllm
from fastapi import FastAPI
from starlette.routing import Mount
from vllm.config import ProfilerConfig
from vllm.entrypoints.launchers.app import build_app

from frontend.args import parse
from frontend.http.operator.operate import Operating, vllms_routes
from frontend.http.operator.operation_queries import READS
from frontend.http.operator.vllm_routes import ADAPTERS, PROFILER, REFUSED, REPLACED
from frontend.http.server.vllm_server import replace_engine_routes
from frontend.workers import Members
from setup.limits_page import SERVED
from tests.by_version import NOT_HERE

_ENTRYPOINTS = Path(vllm.__file__).parent / "entrypoints"
_METHODS = {"get", "post", "put", "delete", "patch", "head", "websocket", "api_route"}

OTHER_SERVERS = {"launchers/dp_supervisor.py", "cli/preload.py"}
"""Processes of vLLM's that are none here."""


def declared() -> dict[str, str]:
    """Paths in vLLM's own sources, whatever flag or model they are for, and the file of each."""
    found: dict[str, str] = {}
    for file in _ENTRYPOINTS.rglob("*.py"):
        name = file.relative_to(_ENTRYPOINTS).as_posix()
        if name not in OTHER_SERVERS:
            found |= dict.fromkeys(_paths(ast.parse(file.read_text())), name)
    return found


def _paths(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        whose = node.func.value
        routes = isinstance(whose, ast.Name) and whose.id.endswith(("router", "app"))
        if not (routes and node.func.attr in _METHODS | {"add_api_route", "mount"} and node.args):
            continue
        path = node.args[0]
        if isinstance(path, ast.Constant) and isinstance(path.value, str):
            yield path.value


def everything(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """vLLM's own app with all that flags and environment add, for a model that generates."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    args = parse([]).serve
    args.enable_fault_tolerance = True
    args.enable_tokenizer_info_endpoint = True
    args.enable_scale_out = True
    args.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp")
    return build_app(args, ("generate", "transcription", "realtime"), None)


def paths_of(app: FastAPI) -> set[str]:
    # Metrics and the pages' files are mounted, and have no method of their own.
    return {str(getattr(route, "path", "")) for route in app.routes}


def test_every_route_stands_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one of vLLM's: serve it, let workers do it, or say in vllm_routes.py why not."""
    places = [SERVED.keys(), PROFILER, ADAPTERS, REFUSED.keys()]
    listed = frozenset[str]().union(*places)
    assert len(listed) == sum(map(len, places))
    source, built = declared(), paths_of(everything(monkeypatch))
    assert {path: source.get(path) for path in (source.keys() | built) - listed} == {}
    gone = listed - source.keys() - built - NOT_HERE
    assert gone <= {
        "/redoc",  # FastAPI's, as /docs is
        "/docs", "/docs/oauth2-redirect", "/static",  # by the flag for pages
    }  # fmt: skip


def test_every_reason_is_one() -> None:
    for table in (SERVED, REFUSED):
        for path, words in table.items():
            assert path.startswith("/") and len(words) > 10


def test_what_concerns_engines_is_ours_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = everything(monkeypatch)
    before = paths_of(app)
    replace_engine_routes(app, Operating(Members()))
    assert before <= paths_of(app)
    pooling = {path for path, how in SERVED.items() if "pool" in how}
    assert not pooling & paths_of(app), "a model that generates has none of these: vLLM's own 404"
    for route in app.routes:
        if isinstance(route, Mount):
            continue
        ours = getattr(route, "endpoint", None)
        of_ours = str(getattr(ours, "__module__", "")).startswith("frontend.")
        assert of_ours == (getattr(route, "path", "") in REPLACED), route


def test_every_operation_has_vllms_name() -> None:
    theirs = {path.rpartition("/")[2] for path in PROFILER | ADAPTERS | REFUSED.keys()}
    assert READS.keys() - theirs == {"reload_weights"}


def test_who_asks_for_an_operation_by_vllms_name_is_told_ours() -> None:
    for name in READS.keys() & {path.removeprefix("/") for path in REFUSED}:
        assert REFUSED[f"/{name}"] == f"POST /mmrouter/workers/{name} does it"


async def test_what_vllms_app_has_for_a_model_that_pools_stays() -> None:
    app = FastAPI()
    app.add_api_route("/v1/embeddings", _nothing, methods=["POST"])
    replace_engine_routes(app, Operating(Members()))
    (route,) = (each for each in app.routes if getattr(each, "path", "") == "/v1/embeddings")
    assert getattr(route, "endpoint", None) is _nothing


async def _nothing() -> None:
    pass


async def test_what_is_refused_says_why() -> None:
    app = FastAPI()
    app.include_router(vllms_routes(Operating(Members())))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as http:
        for path, reason in REFUSED.items():
            method = "DELETE" if path.endswith("}") else "GET"
            answer = await http.request(method, path)
            assert answer.status_code == 501
            assert answer.json()["detail"] == f"{path} does nothing here: {reason}"


def test_a_route_has_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries and fuzzing go by the description: what is not in it, they never ask."""
    hidden = {
        str(getattr(route, "path", ""))
        for route in everything(monkeypatch).routes
        if not getattr(route, "include_in_schema", False)
    }
    assert hidden <= UNDESCRIBED | REFUSED.keys()


UNDESCRIBED = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/metrics"}
"""Routes that read nothing of a request."""

"""A fleet with a key, and users who need one and are not trusted with everything."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from common import fleet_key
from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.lab import image
from tests.e2e.odd import ask
from tests.e2e.processes import HttpServer, Process, start_frontend, start_worker
from tests.fakes.etcd import BINARIES, etcd_cluster
from tests.pictures import data_uri, picture
from tests.waiting import until

QUESTION = {"model": "demo", "prompt": "one two three four " * 20, "max_tokens": 4}


@dataclass(frozen=True)
class Locked:
    worker: Process
    frontend: HttpServer
    discovery: Path | str
    logs: Path


@pytest.fixture(scope="module")
def locked(
    model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo
) -> Iterator[Locked]:
    """A worker and a frontend with a fleet key, which find each other in etcd; users need a key
    of their own.
    """
    directory = tmp_path_factory.mktemp("locked")
    if BINARIES is None:
        yield from _locked(model, directory, directory / "discovery", let_go)
        return
    with etcd_cluster(directory) as (member,):
        yield from _locked(model, directory, f"etcd://{member.endpoint}/fleet", let_go)


def _locked(model: Path, directory: Path, discovery: Path | str, let_go: LetGo) -> Iterator[Locked]:
    fleet_key.new(directory / "fleet.key")
    for who, keys in (("users", "sesame\nopal\n"), ("admins", "open\n")):
        (directory / who).write_text(keys)
        (directory / who).chmod(0o600)
    logs = directory
    key = f"--fleet-key-file={directory / 'fleet.key'}"
    # Any loopback address but the usual one.
    worker = start_worker("locked", model, discovery, logs, key, "--worker-host=127.0.0.2")
    flags = [
        key,
        f"--api-key-file={directory / 'users'}",
        f"--admin-key-file={directory / 'admins'}",
        "--no-trust-request-mm-kwargs",
        "--max-body-mb=1",
    ]
    frontend = start_frontend("locked-frontend", discovery, logs, *flags)
    try:
        wait_for_workers(frontend, [worker], headers={"Authorization": "Bearer open"})
        yield Locked(worker, frontend, discovery, logs)
    finally:
        let_go(worker, frontend)


@pytest.fixture
def user(locked: Locked) -> Iterator[Endpoint]:
    endpoint = Endpoint(locked.frontend.url)
    endpoint.http.headers["Authorization"] = "Bearer sesame"
    yield endpoint
    endpoint.close()


@pytest.fixture
def other_user(locked: Locked) -> Iterator[Endpoint]:
    endpoint = Endpoint(locked.frontend.url)
    endpoint.http.headers["Authorization"] = "Bearer opal"
    yield endpoint
    endpoint.close()


@pytest.fixture
def admin(locked: Locked) -> Iterator[Endpoint]:
    endpoint = Endpoint(locked.frontend.url)
    endpoint.http.headers["Authorization"] = "Bearer open"
    yield endpoint
    endpoint.close()


def test_a_name_that_one_key_planted_is_unknown_to_another(
    user: Endpoint, other_user: Endpoint
) -> None:
    def answer(endpoint: Endpoint, shown: str | None, salt: str | None = None) -> str:
        url = None if shown is None else {"url": data_uri(picture(shown))}
        part = {"type": "image_url", "image_url": url, "uuid": "guessed"}
        reply = ask(endpoint, part, cache_salt=salt)
        if reply.status_code == 400:
            assert "nothing is kept under its uuid" in reply.text
            return "unknown"
        return str(reply.json()["choices"][0]["message"]["content"])

    mine = answer(user, "of one user")
    assert answer(other_user, None) == "unknown"
    assert answer(user, None, "pepper") == "unknown"
    yours = answer(other_user, "of another user")
    assert answer(user, None) == mine != yours
    assert answer(other_user, None) == yours


def test_requests_run_and_events_come_over_encrypted_sockets(
    user: Endpoint, admin: Endpoint
) -> None:
    user.http.post("/v1/completions", json=QUESTION).raise_for_status()
    again = user.http.post("/v1/completions", json=QUESTION).json()
    assert again["choices"][0]["text"]
    # The worker's events, and not a prediction alone, say what it holds.
    (rank,) = admin.workers()["locked"]["ranks"]
    assert rank["index"] == "exact"
    decision = admin.decision(again["id"])
    assert decision["predicted_cached_tokens"] == decision["realised_cached_tokens"]


@pytest.mark.parametrize("key", [None, "sesam"])
def test_users_without_a_key_see_nothing(locked: Locked, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=locked.frontend.url, headers=headers) as http:
        assert http.post("/v1/completions", json=QUESTION).status_code == 401
        for path in ("/v1/models", "/mmrouter/workers", "/mmrouter/decisions", "/openapi.json"):
            assert http.get(path).status_code == 401, path
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert http.get("/health").status_code == 200
        assert "mmrouter_" in http.get("/metrics").text


def test_what_all_asked_for_is_for_admins_who_ask_for_nothing(
    user: Endpoint, admin: Endpoint
) -> None:
    for path in ("/mmrouter/workers", "/mmrouter/workers/refused", "/mmrouter/decisions"):
        refused = user.http.get(path)
        assert refused.status_code == 403, path
        assert "--admin-key-file" in refused.json()["error"]["message"]
        assert admin.http.get(path).status_code == 200, path
    assert user.http.post("/scale_elastic_ep", json={}).status_code == 403
    assert admin.http.post("/v1/completions", json=QUESTION).status_code == 401


def test_a_body_that_is_too_large_is_refused_in_a_sentence(user: Endpoint) -> None:
    reply = user.http.post("/v1/completions", json=QUESTION | {"prompt": "x" * (1 << 20)})
    assert reply.status_code == 413
    assert "--max-body-mb" in reply.json()["error"]["message"]
    assert user.http.post("/v1/completions", json=QUESTION).status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        {"mm_processor_kwargs": {"max_pixels": 12544}},
        {"media_io_kwargs": {"image": {"image_mode": "L"}}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_processing_need_trust(user: Endpoint, options: dict[str, Any]) -> None:
    shown = image(data_uri(picture("trusted")))
    body = {"model": "demo", "messages": [{"role": "user", "content": [shown]}], "max_tokens": 1}
    reply = user.http.post("/v1/chat/completions", json=body | options)
    assert reply.status_code == 400
    assert "--trust-request-mm-kwargs" in reply.json()["error"]["message"]
    assert user.http.post("/v1/chat/completions", json=body).status_code == 200


async def test_a_frontend_without_the_key_is_told_so(locked: Locked) -> None:
    stranger = start_frontend("stranger", locked.discovery, locked.logs)
    try:
        stranger.wait_for_status(503)
        # A card counts once it was renewed while the frontend looks on.
        refused = f"{stranger.url}/mmrouter/workers/refused"
        await until(lambda: "--fleet-key-file" in httpx.get(refused).text)
        async with httpx.AsyncClient() as http:
            answer = await http.get(stranger.url + "/v1/models")
        assert answer.status_code == 503 and "1 refused" in answer.text
        assert "fleet" not in answer.text, "that is for operators"
    finally:
        stranger.stop()

"""A fleet with a key, and users who need one and are not trusted with everything."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from common import fleet_key
from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.processes import HttpServer, Process, start_frontend, start_worker
from tests.e2e.test_scenarios import image
from tests.pictures import data_uri, picture

QUESTION = {"model": "demo", "prompt": "one two three four " * 20, "max_tokens": 4}


@dataclass(frozen=True)
class Locked:
    worker: Process
    frontend: HttpServer
    discovery: Path
    logs: Path


@pytest.fixture(scope="module")
def locked(
    model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo
) -> Iterator[Locked]:
    """A worker and a frontend with a fleet key; users need a key of their own."""
    directory = tmp_path_factory.mktemp("locked")
    fleet_key.new(directory / "fleet.key")
    (directory / "users").write_text("sesame\n")
    (directory / "users").chmod(0o600)
    discovery, logs = directory / "discovery", directory
    key = f"--fleet-key-file={directory / 'fleet.key'}"
    # Any loopback address but the usual one.
    worker = start_worker("locked", model, discovery, logs, key, "--worker-host=127.0.0.2")
    flags = [key, f"--api-key-file={directory / 'users'}", "--no-trust-request-mm-kwargs"]
    frontend = start_frontend("locked-frontend", discovery, logs, *flags)
    try:
        wait_for_workers(frontend, [worker], headers={"Authorization": "Bearer sesame"})
        yield Locked(worker, frontend, discovery, logs)
    finally:
        let_go(worker, frontend)


@pytest.fixture
def user(locked: Locked) -> Iterator[Endpoint]:
    endpoint = Endpoint(locked.frontend.url)
    endpoint.http.headers["Authorization"] = "Bearer sesame"
    yield endpoint
    endpoint.close()


def test_requests_run_and_events_come_over_encrypted_sockets(user: Endpoint) -> None:
    user.http.post("/v1/completions", json=QUESTION).raise_for_status()
    again = user.http.post("/v1/completions", json=QUESTION).json()
    assert again["choices"][0]["text"]
    # The worker's events, and not a prediction alone, say what it holds.
    (rank,) = user.workers()["locked"]["ranks"]
    assert rank["index"] == "exact"
    decision = user.decision(again["id"])
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


def test_a_frontend_without_the_key_is_told_so(locked: Locked) -> None:
    stranger = start_frontend("stranger", locked.discovery, locked.logs)
    try:
        stranger.wait_for_status(503)
        reply = httpx.get(stranger.url + "/v1/models")
        assert "--fleet-key-file" in reply.json()["error"]["message"]
    finally:
        stranger.stop()


def test_a_worker_that_would_leave_the_host_without_a_key_does_not_start(
    locked: Locked, model: Path
) -> None:
    worker = start_worker(
        "open", model, locked.discovery, locked.logs, "--worker-host=0.0.0.0"
    )  # fmt: skip
    try:
        assert worker.wait(120) == 1
        assert "--fleet-key-file" in worker.tail()
        assert "Traceback" not in worker.tail()
    finally:
        worker.stop()

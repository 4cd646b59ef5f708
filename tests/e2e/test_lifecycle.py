"""A frontend without workers, workers that do not fit, and nothing left behind."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Endpoint, Stack
from tests.e2e.processes import (
    HttpServer,
    card_of,
    shared_memory_of,
    start_frontend,
    start_worker,
)

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[HttpServer]:
    """A frontend over an empty discovery directory."""
    server = start_frontend("lonely", tmp_path / "cards", tmp_path)
    yield server
    server.stop()


def chat(url: str) -> httpx.Response:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 2}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_without_workers_it_says_so_and_picks_them_up(
    stack: Stack, lonely: HttpServer, tmp_path: Path
) -> None:
    lonely.wait_for_status(503)
    reply = chat(lonely.url)
    assert reply.status_code == 503
    assert "no worker is available" in reply.json()["error"]["message"]

    # The same worker may serve any number of frontends: borrow its card.
    (tmp_path / "cards").mkdir(mode=0o700, exist_ok=True)
    borrowed = card_of(stack.discovery, "w0")
    card = tmp_path / "cards" / f"w0.{borrowed.incarnation}.json"
    card.write_bytes(borrowed.to_json())
    lonely.wait_for_status(200)
    assert chat(lonely.url).status_code == 200

    # The card is gone again, but the worker lives, and that is what counts.
    card.unlink()
    deadline = time.monotonic() + 60
    while "a live link" not in lonely.tail():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert chat(lonely.url).status_code == 200


def test_a_worker_sums_up_its_traffic(stack: Stack, router: Endpoint) -> None:
    assert chat(router.url).status_code == 200
    deadline = time.monotonic() + 120
    while not any(
        "Prefix cache hit rate" in each.log.read_text() for each in stack.workers.values()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_worker_that_does_not_fit_is_refused_by_name_and_says_so_itself(
    stack: Stack, router: Endpoint, model: Path, tmp_path: Path
) -> None:
    misfit = start_worker("misfit", model, stack.discovery, tmp_path, "--block-size=64")
    try:
        deadline = time.monotonic() + 240
        while "refuses this worker" not in misfit.tail():
            misfit.check_alive()
            assert time.monotonic() < deadline, misfit.tail()
            time.sleep(0.1)
        (entry,) = router.http.get("/mmrouter/workers/refused").json()
        assert entry["worker_id"] == "misfit"
        assert "cache.block_size is 64" in entry["reason"] and "32" in entry["reason"]
        assert entry["reason"] in misfit.tail()
    finally:
        misfit.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_frontend_leaves_no_shared_memory(
    stack: Stack, tmp_path: Path, number: signal.Signals
) -> None:
    server = start_frontend("leaving", stack.discovery, tmp_path)
    try:
        server.wait_for_status(200)
        assert shared_memory_of(server.pid)
        server.signal(number)
        assert server.wait() == 0, server.tail()
    finally:
        server.stop()
    assert not shared_memory_of(server.pid)


def test_a_worker_that_cannot_start_says_why(stack: Stack, tmp_path: Path) -> None:
    worker = start_worker("broken", tmp_path / "no-such-model", tmp_path, tmp_path)
    try:
        assert worker.wait() != 0
    finally:
        worker.stop()
    assert "no-such-model" in worker.tail()


WRONG: dict[str, tuple[list[str], dict[str, str]]] = {
    "router-mode": (["--router-mode", "nonsense"], {}),
    "carrier-pigeon": ([], {"DYNAMO_MM_TRANSFER": "carrier-pigeon"}),
    "the model comes from the workers": (["some/model"], {}),
    "no-such-flag": (["--no-such-flag"], {}),
}


def test_a_wrong_command_line_is_a_sentence(tmp_path: Path) -> None:
    started = {
        complaint: start_frontend(f"wrong-{number}", tmp_path, tmp_path, *flags, env=env)
        for number, (complaint, (flags, env)) in enumerate(WRONG.items())
    }
    for complaint, server in started.items():
        try:
            assert server.wait(120) == 2
        finally:
            server.stop()
        assert complaint in server.tail()
        assert "Traceback" not in server.tail(1000)

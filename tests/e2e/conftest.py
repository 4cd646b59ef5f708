"""One pair of workers, one plain vLLM and the frontends over them, for all tests."""

import contextlib
import gc
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.demo_model import shared_demo_model
from tests.e2e.processes import (
    START_TIMEOUT_S,
    HttpServer,
    Process,
    start_frontend,
    start_plain_vllm,
    start_worker,
)
from tests.pictures import picture_server

WORKERS = ("w0", "w1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e" in str(item.path):
            item.add_marker(pytest.mark.e2e)
            # The first test of a module waits for its processes to start.
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module", autouse=True)
def clients_leave_nothing_to_others() -> Iterator[None]:
    """A client's library may leave the connection of a cancelled request to the garbage collector,
    which would come while another test runs, and fail that. What is tested here is in other
    processes.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@dataclass(frozen=True)
class Stack:
    """Everything that runs for the whole session."""

    model: Path
    discovery: Path
    logs: Path
    workers: dict[str, Process]
    plain: HttpServer
    frontend: HttpServer


class Endpoint:
    """An OpenAI endpoint under test, with mmrouter's own views beside it."""

    def __init__(self, url: str) -> None:
        self.url = url
        # vLLM's server closes idle connections after 5 s, just as httpx does: who does it
        # first must not be left to chance.
        limits = httpx.Limits(keepalive_expiry=2)
        self.http = httpx.Client(base_url=url, timeout=60, limits=limits)
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.Client(timeout=60, limits=limits),  # type: ignore[arg-type] # also takes this httpx
        )

    def decision(self, response_id: str) -> dict[str, object]:
        """What the router decided on a response."""
        reply = self.http.get("/mmrouter/decisions", params={"request_id": response_id})
        reply.raise_for_status()
        (decision,) = reply.json()
        return dict(decision)

    def workers(self) -> dict[str, dict[str, Any]]:
        """The frontend's view of the workers by id."""
        views = self.http.get("/mmrouter/workers").json()
        return {each["worker_id"]: each for each in views if each["ranks"]}  # the others are gone

    def close(self) -> None:
        self.openai.close()
        self.http.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model."""
    return shared_demo_model(tmp_path_factory)


LetGo = Callable[..., None]


@pytest.fixture(scope="session")
def let_go() -> Iterator[LetGo]:
    """Asks processes to leave and waits for them at the very end: engines take ten seconds."""
    leaving: list[Process] = []

    def ask_to_leave(*processes: Process) -> None:
        for process in processes:
            process.signal(signal.SIGTERM)
            leaving.append(process)

    yield ask_to_leave
    for process in leaving:
        process.stop()


@pytest.fixture(scope="session")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo) -> Iterator[Stack]:
    """Two workers, a frontend and a plain vLLM, all started side by side."""
    discovery = tmp_path_factory.mktemp("discovery")
    logs = tmp_path_factory.mktemp("logs")
    workers = {name: start_worker(name, model, discovery, logs) for name in WORKERS}
    frontend = start_frontend("frontend", discovery, logs, "--enable-scale-out")
    plain = start_plain_vllm(model, logs, "--enable-scale-out")
    try:
        wait_for_workers(frontend, list(workers.values()))
        plain.wait_for_status(200)
        yield Stack(model, discovery, logs, workers, plain, frontend)
    finally:
        let_go(*workers.values(), frontend, plain)


def wait_for_workers(
    frontend: HttpServer, workers: list[Process], headers: Mapping[str, str] | None = None
) -> None:
    """Wait until a frontend serves and knows the caches of all workers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    seen = "nothing"
    while time.monotonic() < deadline:
        for process in (frontend, *workers):
            process.check_alive()
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.get(frontend.url + "/mmrouter/workers", headers=headers, timeout=5)
            seen = reply.text
            views = reply.json() if reply.status_code == 200 else []
            ranks = [rank["index"] for view in views for rank in view["ranks"]]
            if len(ranks) >= len(workers) and set(ranks) == {"exact"} and frontend.is_ready():
                return
        time.sleep(0.5)
    raise AssertionError(f"{frontend.name} is not ready but sees {seen}:\n{frontend.tail()}")


@pytest.fixture(scope="session")
def router(stack: Stack) -> Iterator[Endpoint]:
    """The frontend under test."""
    endpoint = Endpoint(stack.frontend.url)
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="session")
def plain(stack: Stack) -> Iterator[Endpoint]:
    """vLLM's own server over the same model."""
    endpoint = Endpoint(stack.plain.url)
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="session")
def pictures_url() -> Iterator[str]:
    """Base URL of a server of pictures."""
    with picture_server() as url:
        yield url

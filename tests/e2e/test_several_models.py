"""Two models behind one frontend: the demo model's workers, and one of another family that leaves
and comes back.
"""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.demo_model import shared_demo_model
from tests.e2e.conftest import Endpoint, LetGo, Stack, wait_for_workers
from tests.e2e.lab import image, words
from tests.e2e.processes import (
    START_TIMEOUT_S,
    HttpServer,
    Process,
    start_frontend,
    start_worker,
)
from tests.pictures import data_uri, picture

OTHER = "other"


@dataclass
class Pair:
    """A frontend over workers of two models.

    Attributes:
        worker: the only one of the other model.
    """

    stack: Stack
    frontend: HttpServer
    endpoint: Endpoint
    worker: Process
    other_flags: tuple[Any, ...]

    def start_again(self) -> None:
        self.worker = start_worker(*self.other_flags)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            self.frontend.check_alive()
            assert time.monotonic() < deadline, self.frontend.tail()
            time.sleep(0.2)

    def models(self) -> list[str]:
        return [each["id"] for each in self.endpoint.http.get("/v1/models").json()["data"]]

    def ask(self, model: str, *parts: dict[str, Any]) -> httpx.Response:
        content = list(parts) or [words("What is a router?")]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            "temperature": 0,
        }
        return self.endpoint.http.post("/v1/chat/completions", json=body)


@pytest.fixture(scope="module")
def pair(stack: Stack, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo) -> Iterator[Pair]:
    other = shared_demo_model(tmp_path_factory, "idefics3")
    flags = (OTHER, other, stack.discovery, stack.logs, f"--served-model-name={OTHER}")
    worker = start_worker(*flags)
    frontend = start_frontend(
        "several", stack.discovery, stack.logs, "--models-from-cards", "--preprocess-workers=1"
    )
    made = Pair(stack, frontend, Endpoint(frontend.url), worker, flags)
    try:
        wait_for_workers(frontend, [*stack.workers.values(), worker])
        made.wait_until(lambda: set(made.models()) == {"demo", OTHER})
        yield made
    finally:
        made.endpoint.close()
        let_go(made.worker, frontend)


def test_each_answers_as_it_does_alone(pair: Pair, plain: Endpoint) -> None:
    shown = image(data_uri(picture("shown to two models")))
    ours = [pair.ask(name, shown, words("What?")).json() for name in ("demo", OTHER)]
    assert [each["model"] for each in ours] == ["demo", OTHER]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": [shown, words("What?")]}],
        "max_tokens": 8,
        "temperature": 0,
    }
    alone = plain.http.post("/v1/chat/completions", json=body).json()
    assert ours[0]["choices"][0]["message"] == alone["choices"][0]["message"]
    assert ours[0]["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    chosen = [pair.endpoint.decision(each["id"])["worker_id"] for each in ours]
    assert chosen[0] in pair.stack.workers and chosen[1] == OTHER
    again = pair.ask(OTHER, shown, words("What?")).json()
    assert again["choices"][0]["message"] == ours[1]["choices"][0]["message"]
    assert pair.endpoint.workers()[OTHER]["hf_processor_runs"] == 0


def test_all_views_show_both(pair: Pair) -> None:
    models = {name: each["model"] for name, each in pair.endpoint.workers().items()}
    assert models == {"w0": "demo", "w1": "demo", OTHER: OTHER}
    assert pair.endpoint.http.get("/mmrouter/summary").json()["models"] == ["demo", OTHER]
    assert pair.endpoint.http.get("/health").status_code == 200
    page = pair.endpoint.http.get("/metrics").text
    for line in (
        'mmrouter_workers{state="connected"} 3.0',
        'mmrouter_index_ranks{knowledge="exact"} 3.0',
        f'mmrouter_model_workers{{model="{OTHER}"}} 1.0',
        'mmrouter_model_workers{model="demo"} 2.0',
        f'mmrouter_model_serving{{model="{OTHER}"}} 1.0',
    ):
        assert line in page.splitlines(), line
    before = _requests(page)
    for name in ("demo", OTHER):
        assert pair.ask(name).status_code == 200
    assert _requests(pair.endpoint.http.get("/metrics").text) == before + 2


def _requests(page: str) -> float:
    name = 'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"}'
    (line,) = (line for line in page.splitlines() if line.startswith(name))
    return float(line.split()[-1])


def test_whom_nobody_has_gets_vllms_404(pair: Pair, plain: Endpoint) -> None:
    body = {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}
    ours, theirs = (
        each.http.post("/v1/chat/completions", json=body) for each in (pair.endpoint, plain)
    )
    assert ours.status_code == theirs.status_code == 404
    error, expected = ours.json()["error"], theirs.json()["error"]
    assert error.pop("message") == f"{expected.pop('message').removesuffix('.')}, {OTHER}."
    assert error == expected


def test_a_model_leaves_with_its_last_worker_and_comes_back(pair: Pair) -> None:
    before = pair.ask(OTHER).json()["choices"][0]["message"]
    pair.worker.signal(signal.SIGTERM)
    pair.wait_until(lambda: pair.models() == ["demo"])
    gone = pair.ask(OTHER)
    assert gone.status_code == 404
    message = gone.json()["error"]["message"]
    assert message == f"The model `{OTHER}` does not exist. Valid aliases: demo."
    assert pair.ask("demo").status_code == 200
    pair.start_again()
    pair.wait_until(lambda: OTHER in pair.models())
    wait_for_workers(pair.frontend, [*pair.stack.workers.values(), pair.worker])
    assert pair.ask(OTHER).json()["choices"][0]["message"] == before
    assert "Traceback" not in pair.frontend.log.read_text()

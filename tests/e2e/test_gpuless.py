"""Frontends of vLLM's CUDA build on a machine without a GPU, in front of workers of another build.

That is how most users install it: the CUDA wheel everywhere. Workers here are of the build for
CPU, since an engine needs a device. With GPULESS_PYTHON, the interpreter of an environment that has
the CUDA wheel, frontends run there (docs/vllm-0.33.md).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from common.vllm_compat.features import INSTALLED
from common.vllm_compat.preflight import CPU_ONLY
from tests.clips import data_url, film, sound
from tests.demo_model import shared_demo_model
from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.lab import ask, image, text, usage, words
from tests.e2e.processes import HttpServer, Process, card_of, start_frontend, start_worker
from tests.fakes.cuda_build import CudaBuild, make_cuda_build
from tests.pictures import data_uri, picture
from tests.waiting import until

LIMITS: Final = '--limit-mm-per-prompt={"image": 6, "video": 3, "audio": 3}'
WAYS: Final = {"processes": "--processes=2", "media-processes": "--preprocess-workers=2"}
"""What starts other processes that import vLLM."""

MEDIA: Final[Mapping[str, Callable[[str], dict[str, Any]]]] = {
    "text": lambda name: words(f"Say {name} {name * 20}"),  # blocks of its own
    "picture": lambda name: image(data_uri(picture(name))),
    "film": lambda name: part("video", data_url("video/mp4", film(name))),
    "sound": lambda name: part("audio", data_url("audio/wav", sound(name))),
}


def part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


@dataclass(frozen=True)
class Fleet:
    """A worker, and frontends over it.

    Attributes:
        cpu: a frontend of the worker's own build.
        servers: frontends of the CUDA build, by way.
        build: the CUDA build.
    """

    model: Path
    cards: Path
    worker: Process
    cpu: HttpServer
    servers: dict[str, HttpServer]
    build: CudaBuild


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, let_go: LetGo) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("gpuless")
    model = shared_demo_model(tmp_path_factory, "qwen2.5-omni")
    build = make_cuda_build(tmp_path_factory.mktemp("build"))
    cards = directory / "cards"
    worker = start_worker("omni", model, cards, directory, LIMITS)
    cpu = start_frontend("cpu", cards, directory)
    servers = {
        way: start_frontend(
            way, cards, directory, flag,
            env=build.environment, python=os.environ.get("GPULESS_PYTHON"),
        )
        for way, flag in WAYS.items()
    }  # fmt: skip
    try:
        for frontend in (cpu, *servers.values()):
            wait_for_workers(frontend, [worker])
        yield Fleet(model, cards, worker, cpu, servers, build)
    finally:
        let_go(worker, cpu, *servers.values())


@dataclass(frozen=True)
class Answer:
    """What a frontend answered and decided."""

    text: str
    prompt_tokens: int
    decision: dict[str, Any]

    @property
    def process(self) -> str:
        return str(self.decision.get("process"))

    @property
    def hashes(self) -> list[str]:
        return [medium["mm_hash"] for medium in self.decision["media"]]

    @property
    def is_known(self) -> bool:
        """Whether the prompt was in the cache, and as much of it as was predicted."""
        predicted: int = self.decision["predicted_cached_tokens"]
        return predicted == self.decision["realised_cached_tokens"] > 0


def asked(frontend: HttpServer, *content: dict[str, Any]) -> Answer:
    """Ask over a connection of its own, which any process may get."""
    endpoint = Endpoint(frontend.url)
    try:
        response = ask(endpoint, list(content))
        decision = endpoint.decision(response.id)
        return Answer(text(response), usage(response).prompt_tokens, decision)
    finally:
        endpoint.close()


def asked_twice_of_all(frontend: HttpServer, processes: int, *content: dict[str, Any]) -> Answer:
    """Ask until each process has been asked twice, which then has predicted what was cached; the
    first answer. All are the same."""
    first = asked(frontend, *content)
    seen, again = {first.process}, set[str]()
    while len(again) < processes:
        answer = asked(frontend, *content)
        assert (answer.text, answer.prompt_tokens) == (first.text, first.prompt_tokens)
        assert answer.hashes == first.hashes
        if answer.process in seen:
            assert answer.is_known, answer.decision
            again.add(answer.process)
        seen.add(answer.process)
    return first


@pytest.mark.parametrize("way", WAYS)
def test_it_serves_as_a_frontend_of_the_other_build(fleet: Fleet, way: str) -> None:
    frontend = fleet.servers[way]
    for kind, medium in MEDIA.items():
        content = (medium(f"{way}-{kind}"), words("What is this?"))
        first = asked_twice_of_all(frontend, 2 if way == "processes" else 1, *content)
        shipped = [move["how"] for move in first.decision["media"]]
        assert shipped == ([] if kind == "text" else ["shipped"])
        other = asked_twice_of_all(fleet.cpu, 1, *content)
        assert (other.text, other.prompt_tokens) == (first.text, first.prompt_tokens)
        assert other.hashes == first.hashes


def test_it_touches_no_device(fleet: Fleet) -> None:
    for frontend in fleet.servers.values():
        children = psutil.Process(frontend.pid).children(recursive=True)
        # Those that decode are forked with the environment, and their title stands where it was.
        children = [child for child in children if not child.cmdline()[0].endswith("decodes media")]
        assert len(children) >= 2
        for child in children:
            assert CPU_ONLY.items() <= child.environ().items(), child.cmdline()
    assert not fleet.build.initialised()


def refused(frontend: HttpServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]]
    found = httpx.get(frontend.url + "/mmrouter/workers/refused", timeout=30).json()
    return found


async def test_a_worker_of_another_version_is_refused_by_name(fleet: Fleet) -> None:
    card = card_of(fleet.cards, "omni")
    stranger = card.model_copy(update={"worker_id": "stranger", "vllm_version": "0.31.0"})
    path = fleet.cards / f"stranger.{card.incarnation}.json"
    path.write_bytes(stranger.to_json())
    try:
        for frontend in fleet.servers.values():
            await until(partial(refused, frontend))
            (entry,) = refused(frontend)
            assert entry["worker_id"] == "stranger"
            assert f"vllm_version is '0.31.0' on its card but '{INSTALLED}'" in entry["reason"]
    finally:
        path.unlink()


def test_a_worker_says_that_it_has_no_device(fleet: Fleet, tmp_path: Path) -> None:
    worker = start_worker(
        "no-device", fleet.model, fleet.cards, tmp_path, env=fleet.build.environment
    )
    assert worker.wait(timeout=240) == 1
    (sentence,) = worker.log.read_text().splitlines()
    assert f"the installed vLLM {INSTALLED} is a build for GPUs, and no GPU is visible" in sentence

"""Flags of a worker that change how media are processed: frontends follow them.

Every answer is compared with that of a plain vLLM which has the same flags.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clips import data_url, film
from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.odd import compare
from tests.e2e.processes import start_frontend, start_plain_vllm, start_worker
from tests.pictures import data_uri, picture

FLAGS = ("--no-mm-device-do-normalize", "--model-impl=transformers")

Pair = tuple[dict[str, Endpoint], Endpoint]


@pytest.fixture(scope="module", params=FLAGS)
def flagged(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    let_go: LetGo,
) -> Iterator[Pair]:
    """Frontends by where they have media processed, and a plain vLLM."""
    directory = tmp_path_factory.mktemp("flagged")
    cards = directory / "cards"
    worker = start_worker("flagged", model, cards, directory, request.param)
    plain = start_plain_vllm(model, directory, request.param)
    frontends = {
        "by a process": start_frontend("process", cards, directory, "--preprocess-workers=1"),
        "by the worker": start_frontend(
            "worker", cards, directory, env={"DYNAMO_DISABLE_NIXL_MM": "1"}
        ),
    }
    ended = [plain, *frontends.values(), worker]
    try:
        plain.wait_for_status(200)
        for frontend in frontends.values():
            wait_for_workers(frontend, [worker])
        endpoints = {where: Endpoint(frontend.url) for where, frontend in frontends.items()}
        by_vllm = Endpoint(plain.url)
        yield endpoints, by_vllm
        for endpoint in (*endpoints.values(), by_vllm):
            endpoint.close()
    finally:
        let_go(*ended)


@pytest.mark.parametrize("where", ["by a process", "by the worker"])
def test_answers_are_those_of_a_plain_vllm(flagged: Pair, where: str) -> None:
    frontends, plain = flagged
    shown = {"type": "image_url", "image_url": {"url": data_uri(picture(f"flag-{where}"))}}
    clip = data_url("video/mp4", film(f"flag-{where}"))
    seen = {"type": "video_url", "video_url": {"url": clip}}
    for parts in ([shown], [shown], [seen], [seen, shown]):
        reply = compare(frontends[where], plain, *parts, max_tokens=16, ignore_eos=True)
        assert reply.status_code == 200, reply.text

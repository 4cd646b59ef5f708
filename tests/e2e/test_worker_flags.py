"""Flags of a worker that change how media are processed: frontends follow them.

Every answer is compared with that of a plain vLLM which has the same flags. The worker also keeps
as few KV events for replay as it can.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clips import data_url, film
from tests.e2e import lab
from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.odd import compare
from tests.e2e.processes import Process, start_frontend, start_plain_vllm, start_worker
from tests.pictures import data_uri, picture

FLAGS = ("--no-mm-device-do-normalize", "--model-impl=transformers")

FEW_EVENTS = "--kv-events-config=" + json.dumps(
    {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
        "buffer_steps": 1,
    }
)


class Flagged(NamedTuple):
    """A worker, frontends by where they have media processed, and a plain vLLM."""

    cards: Path
    worker: Process
    frontends: dict[str, Endpoint]
    plain: Endpoint


@pytest.fixture(scope="module", params=FLAGS)
def flagged(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    let_go: LetGo,
) -> Iterator[Flagged]:
    """All with one flag."""
    directory = tmp_path_factory.mktemp("flagged")
    cards = directory / "cards"
    worker = start_worker("flagged", model, cards, directory, request.param, FEW_EVENTS)
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
        yield Flagged(cards, worker, endpoints, by_vllm)
        for endpoint in (*endpoints.values(), by_vllm):
            endpoint.close()
    finally:
        let_go(*ended)


@pytest.mark.parametrize("where", ["by a process", "by the worker"])
def test_answers_are_those_of_a_plain_vllm(flagged: Flagged, where: str) -> None:
    _, _, frontends, plain = flagged
    shown = {"type": "image_url", "image_url": {"url": data_uri(picture(f"flag-{where}"))}}
    clip = data_url("video/mp4", film(f"flag-{where}"))
    seen = {"type": "video_url", "video_url": {"url": clip}}
    for parts in ([shown], [shown], [seen], [seen, shown]):
        reply = compare(frontends[where], plain, *parts, max_tokens=16, ignore_eos=True)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("flagged", FLAGS[:1], indirect=True)
def test_a_late_frontend_knows_what_was_stored_before(flagged: Flagged, tmp_path: Path) -> None:
    early = flagged.frontends["by a process"]
    question = [lab.words("Who said this, and when? " * 30)]
    first = lab.ask(early, question)
    for number in range(80):  # each of them at least one batch of events, of which 64 are kept
        lab.ask(early, [lab.words(f"{number} and then something else. " * 8)])
    late = start_frontend("late", flagged.cards, tmp_path)
    try:
        wait_for_workers(late, [flagged.worker])
        endpoint = Endpoint(late.url)
        (known,), (before,) = (
            [rank for view in each.workers().values() for rank in view["ranks"]]
            for each in (endpoint, early)
        )
        assert (known["index"], known["blocks"]) == ("exact", before["blocks"])
        again = lab.ask(endpoint, question)
        decision = endpoint.decision(again.id)
        assert lab.text(again) == lab.text(first)
        assert decision["index"] == "exact"
        assert decision["predicted_cached_tokens"] == decision["realised_cached_tokens"]
        assert decision["realised_cached_tokens"]
        endpoint.close()
    finally:
        late.stop()

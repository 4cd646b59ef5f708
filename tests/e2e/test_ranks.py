"""A worker with two data-parallel ranks: each is a target of its own, also for two frontends."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Endpoint, LetGo, wait_for_workers
from tests.e2e.lab import ask, hf_runs, image, text, usage, words
from tests.e2e.processes import (
    START_TIMEOUT_S,
    card_of,
    start_frontend,
    start_worker,
    worker_pid,
)
from tests.pictures import data_uri, picture

LONG = "Once upon a time a small green house stood under a tall old tree near the river. " * 8


class Duo:
    """A worker of two ranks, and three frontends over it."""

    def __init__(self, one: Endpoint, two: Endpoint, in_turn: Endpoint, cards: Path) -> None:
        self.one, self.two, self.in_turn, self.cards = one, two, in_turn, cards


@pytest.fixture(scope="module")
def duo(model: Path, tmp_path_factory: pytest.TempPathFactory, let_go: LetGo) -> Iterator[Duo]:
    cards, logs = tmp_path_factory.mktemp("duo"), tmp_path_factory.mktemp("logs")
    worker = start_worker("duo", model, cards, logs, "--data-parallel-size=2")
    frontends = [
        start_frontend("frontend-one", cards, logs),
        start_frontend("frontend-two", cards, logs),
        start_frontend("frontend-in-turn", cards, logs, "--router-mode=round-robin"),
    ]
    endpoints = [Endpoint(frontend.url) for frontend in frontends]
    try:
        for frontend in frontends:
            wait_for_workers(frontend, [worker])
        one, two, in_turn = endpoints
        yield Duo(one, two, in_turn, cards)
        # One dead rank ends the worker: to frontends it must not look like a healthy one.
        kill_one_engine(cards, "duo")
        assert worker.wait(120) != 0, worker.tail()
        for endpoint in endpoints:
            wait_until(partial(_gone, endpoint))
    finally:
        for endpoint in endpoints:
            endpoint.close()
        let_go(worker, *frontends)


def kill_one_engine(cards: Path, name: str) -> None:
    children = psutil.Process(worker_pid(cards, name)).children(recursive=True)
    engines = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    os.kill(engines[-1].pid, signal.SIGKILL)


def _gone(endpoint: Endpoint) -> bool:
    return not connected(endpoint)


def connected(endpoint: Endpoint) -> set[str]:
    return {name for name, view in endpoint.workers().items() if view["connected"]}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks(endpoint: Endpoint, name: str = "duo") -> dict[int, dict[str, Any]]:
    return {one["rank"]: one for one in endpoint.workers()[name]["ranks"]}


def idle(*endpoints: Endpoint) -> bool:
    """Whether all that was asked before has ended in everybody's eyes."""
    return not any(
        rank["own"]["requests"] or rank["others"]["requests"]
        for endpoint in endpoints
        for rank in ranks(endpoint).values()
    )


def target(endpoint: Endpoint, response_id: str) -> tuple[Any, Any]:
    decision = endpoint.decision(response_id)
    return decision["worker_id"], decision["rank"]


def test_the_card_has_each_rank_with_its_own_events_and_size(duo: Duo) -> None:
    card = card_of(duo.cards, "duo")
    assert card.ranks == [0, 1]
    assert [source.rank for source in card.kv_event_sources] == [0, 1]
    assert len({source.endpoint for source in card.kv_event_sources}) == 2
    assert len({source.replay_endpoint for source in card.kv_event_sources}) == 2
    assert card.capacity.num_blocks == 2048  # of ENGINE_FLAGS, for each


def test_a_repeated_prompt_goes_to_its_rank_and_finds_what_was_predicted(duo: Duo) -> None:
    wait_until(lambda: idle(duo.one))
    homes = {}
    for name in ("river", "tree", "house"):
        question = [words(f"Of the {name}. {LONG}")]
        first = ask(duo.one, question)
        homes[name] = target(duo.one, first.id)
        again = ask(duo.one, question)
        decision = duo.one.decision(again.id)
        assert target(duo.one, again.id) == homes[name]
        assert (
            decision["predicted_cached_tokens"] == usage(again).prompt_tokens_details.cached_tokens
        )
        assert decision["realised_cached_tokens"] == decision["predicted_cached_tokens"] != 0
        assert text(again) == text(first)
        # What the other rank holds is known apart: of this prompt, no more than the template.
        overlaps = {one["rank"]: one["overlap_blocks"] for one in candidates(decision)}
        assert set(overlaps) == {0, 1}
        assert overlaps.pop(homes[name][1]) > 2
        assert list(overlaps.values()) <= [1]
    assert {rank["index"] for rank in ranks(duo.one).values()} == {"exact"}


def candidates(decision: dict[str, object]) -> list[dict[str, Any]]:
    found: Any = decision["candidates"]
    return list(found)


def test_while_one_rank_works_another_prompt_goes_to_the_other(duo: Duo) -> None:
    """Whoever sent the work: the other frontend learns of it from the worker."""
    wait_until(lambda: idle(duo.one, duo.two))
    stream = duo.one.openai.completions.create(
        model="demo", prompt=f"At work. {LONG}", max_tokens=3000, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    with stream:
        response_id = next(iter(stream)).id
        _, busy = target(duo.one, response_id)
        own = ranks(duo.one)
        assert own[busy]["own"]["requests"] == 1 and own[1 - busy]["own"]["requests"] == 0
        wait_until(lambda: ranks(duo.two)[busy]["others"]["decode_tokens"] > 0)
        seen = ranks(duo.two)
        assert seen[busy]["others"]["requests"] == 1 and seen[busy]["own"]["requests"] == 0
        assert seen[1 - busy]["others"]["requests"] == 0
        metric = f'mmrouter_rank_requests{{rank="{busy}",whose="others",worker_id="duo"}} 1.0'
        assert metric in duo.two.http.get("/metrics").text
        for endpoint in (duo.one, duo.two):
            other = ask(endpoint, [words(f"Meanwhile at {endpoint.url}. {LONG}")])
            assert target(endpoint, other.id) == ("duo", 1 - busy)
    wait_until(lambda: idle(duo.one, duo.two))


def test_media_reach_both_ranks_and_are_sent_once(duo: Duo) -> None:
    cat, dog = (image(data_uri(picture(name))) for name in ("ranks-cat", "ranks-dog"))
    for question in ([cat, words("What?")], [dog, words("What?")], [dog, cat, words("What?")]):
        answers = [ask(duo.in_turn, question) for _ in range(4)]
        assert {target(duo.in_turn, answer.id)[1] for answer in answers} == {0, 1}
        assert len({text(answer) for answer in answers}) == 1
        moves: list[Any] = [duo.in_turn.decision(answer.id)["media"] for answer in answers]
        assert {move["how"] for move in moves[0]} <= {"shipped", "held"}
        assert {move["how"] for later in moves[1:] for move in later} == {"held"}
    said = [text(ask(duo.in_turn, [one, words("What?")])) for one in (cat, dog)]
    assert said[0] != said[1]
    assert hf_runs(duo.in_turn)["worker"] == 0

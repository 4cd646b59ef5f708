"""New pictures that are left to workers: the same answers, and the same prompts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import odd_media
from tests.clips import data_url
from tests.e2e.conftest import Endpoint, Stack, wait_for_workers
from tests.e2e.lab import ask, hf_runs, image, leased, text, usage, words
from tests.e2e.odd import compare
from tests.e2e.processes import start_frontend
from tests.pictures import data_uri, picture

SIZE = (616, 616)
TRIES = 10


@pytest.fixture(scope="module")
def leaving(stack: Stack) -> Iterator[Endpoint]:
    """A frontend over the shared workers that leaves pictures to them."""
    frontend = start_frontend(
        "leaving", stack.discovery, stack.logs, "--preprocess-on-workers", "--enable-scale-out"
    )
    try:
        wait_for_workers(frontend, list(stack.workers.values()))
        endpoint = Endpoint(frontend.url)
        yield endpoint
        endpoint.close()
    finally:
        frontend.stop()


def shown(name: str) -> dict[str, Any]:
    return image(data_uri(picture(f"left-{name}", SIZE)))


def rush(router: Endpoint, contents: list[list[dict[str, Any]]]) -> list[Any]:
    """Requests that come at once."""
    with ThreadPoolExecutor(len(contents)) as threads:
        asked = [threads.submit(ask, router, content) for content in contents]
        return [each.result() for each in asked]


def test_a_rush_of_new_pictures(leaving: Endpoint, plain: Endpoint) -> None:
    """Those that would wait in the frontend are left to workers, and nobody can tell by the answer,
    the tokens, or what is cached."""
    ask(leaving, [shown("one"), shown("other")])
    for attempt in range(TRIES):
        before = hf_runs(leaving)
        names = [f"{attempt}-{number}" for number in range(12)]
        contents = [[shown(name), words("What is it?")] for name in names]
        replies = rush(leaving, contents)
        decisions: list[Any] = [leaving.decision(each.id) for each in replies]
        left = [each["media"][0]["transport"] == "reference" for each in decisions]
        ran = {side: runs - before[side] for side, runs in hf_runs(leaving).items()}
        assert ran["frontend"] == len(names) - sum(left)
        if any(left):
            break
    assert any(left) and not all(left)
    assert ran["worker"] == sum(left)
    for content, reply, decision, was_left in zip(contents, replies, decisions, left, strict=True):
        if was_left:
            (choice,) = decision["rendering"]
            assert (choice["place"], choice["reason"]) == ("worker", "sooner")
            assert choice["worker_ms"] < choice["frontend_ms"]
        expected = ask(plain, content)
        assert text(reply) == text(expected)
        assert usage(reply).prompt_tokens == usage(expected).prompt_tokens
        # Again, by whoever has it now: what was predicted of its blocks is so.
        again = ask(leaving, content)
        assert text(again) == text(expected)
        known: Any = leaving.decision(again.id)
        assert known["predicted_cached_tokens"] == known["realised_cached_tokens"] > 0
        assert [move["how"] for move in known["media"]] == ["held"]
    assert leased(leaving) == 0


@pytest.mark.parametrize("name", sorted(odd_media.IMAGES.keys() - odd_media.DEEP))
def test_odd_images(leaving: Endpoint, plain: Endpoint, name: str) -> None:
    compare(leaving, plain, image(data_url("image/png", odd_media.IMAGES[name]())))
    assert leased(leaving) == 0


def test_what_is_rendered_for_clients_has_tensors(leaving: Endpoint) -> None:
    """Whatever waits: it does not go to a worker."""
    messages = [{"role": "user", "content": [shown("one"), shown("rendered")]}]
    body = {"model": "demo", "messages": messages}
    reply = leaving.http.post("/v1/chat/completions/render", json=body)
    assert reply.status_code == 200
    assert reply.json()["features"]["kwargs_data"]["image"]

"""The ten scenarios, by every way that media can travel: who answers, what is cached,
what travels, and that it is right.

Every answer is compared with what a plain vLLM gives to the same request.
"""

from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest

from tests.e2e.conftest import WORKERS, Endpoint, LetGo, Stack, wait_for_workers
from tests.e2e.lab import WAYS, Lab, ask, image, text, usage, words
from tests.e2e.processes import start_frontend
from tests.pictures import data_uri, picture

BLOCK_SIZE = 32


@pytest.fixture(scope="module", params=WAYS)
def lab(
    request: pytest.FixtureRequest,
    stack: Stack,
    router: Endpoint,
    plain: Endpoint,
    pictures_url: str,
    let_go: LetGo,
) -> Iterator[Lab]:
    if request.param == "shm":  # what `auto` finds on one host
        yield Lab("shm", router, plain, pictures_url)
        return
    flags, env = WAYS[request.param]
    server = start_frontend(request.param, stack.discovery, stack.logs, *flags, env=env)
    try:
        wait_for_workers(server, list(stack.workers.values()))
        endpoint = Endpoint(server.url)
        yield Lab(request.param, endpoint, plain, pictures_url)
        endpoint.close()
    finally:
        let_go(server)


WHAT = words("What is this?")


def test_text_only(lab: Lab) -> None:
    question = words(f"Tell me about {lab.way}, the river and the tall old tree. " * 6)
    first = lab.ask(question)
    again = lab.ask(question)
    assert first.cached == 0 and first.media == []
    assert again.worker == first.worker
    assert again.cached >= BLOCK_SIZE
    assert again.cached == again.decision["predicted_cached_tokens"]
    assert first.hf_runs["frontend"] == again.hf_runs["frontend"] == 0


def test_one_image(lab: Lab) -> None:
    asked = lab.ask(lab.drawn("one"), WHAT)
    assert asked.bytes_sent > 0
    assert asked.hf_runs["frontend"] == 1


def test_the_same_image_again(lab: Lab) -> None:
    first = lab.ask(lab.drawn("again"), WHAT)
    again = lab.ask(lab.drawn("again"), WHAT)
    assert again.worker == first.worker
    assert again.cached > 0
    assert again.cached == again.decision["predicted_cached_tokens"]
    assert again.bytes_sent == 0
    assert again.hf_runs == {"frontend": 0, "worker": 0}


def test_the_same_image_twice_in_a_prompt_travels_once(lab: Lab) -> None:
    twice = lab.ask(lab.drawn("twice"), words("and"), lab.drawn("twice"))
    assert len(twice.shipped) == 1


def test_another_image(lab: Lab) -> None:
    first = lab.ask(lab.drawn("this"), WHAT)
    other = lab.ask(lab.drawn("that"), WHAT)
    assert text(first.response) != text(other.response)
    assert other.cached < BLOCK_SIZE, "nothing from the image on is shared"
    assert other.bytes_sent > 0


def test_equal_images_under_two_salts_share_nothing(lab: Lab) -> None:
    one, two, again = (
        lab.ask(lab.drawn("salted"), WHAT, cache_salt=f"{salt}-{lab.way}")
        for salt in ("one", "two", "one")
    )
    assert text(one.response) == text(two.response) == text(again.response)
    assert one.hf_runs["frontend"] == two.hf_runs["frontend"] == 1
    assert one.bytes_sent > 0 and two.bytes_sent > 0
    assert two.cached == 0
    assert again.cached > 0
    assert again.cached == again.decision["predicted_cached_tokens"]
    assert again.bytes_sent == 0
    assert again.hf_runs == {"frontend": 0, "worker": 0}
    (salted,), (unsalted,) = one.media, lab.ask(lab.drawn("salted"), WHAT).media
    assert salted["mm_hash"] != unsalted["mm_hash"]


def test_several_images(lab: Lab) -> None:
    asked = lab.ask(lab.drawn("a"), words("and"), lab.drawn("b"), lab.drawn("c"), words("Compare."))
    assert len(asked.shipped) == 3


def test_staircase(lab: Lab) -> None:
    steps = [lab.drawn("stair-1"), lab.drawn("stair-2"), lab.drawn("stair-3")]
    asked = [lab.ask(*steps[: n + 1]) for n in range(3)]
    assert len({step.worker for step in asked}) == 1
    assert asked[0].cached < asked[1].cached < asked[2].cached
    for before, after in pairwise(asked):
        assert len(after.shipped) == 1, "only the new image travels"
        assert after.cached == after.decision["predicted_cached_tokens"]
        assert after.cached >= usage(before.response).prompt_tokens // 2


def test_swapped_order_does_not_hit(lab: Lab) -> None:
    one, two = lab.drawn("swap-1"), lab.drawn("swap-2")
    first = lab.ask(one, two, words("Compare."))
    swapped = lab.ask(two, one, words("Compare."))
    assert swapped.cached < BLOCK_SIZE
    assert swapped.decision["overlap_blocks"] == 0
    assert swapped.worker == first.worker, "it holds both images"
    assert swapped.shipped == [], "in whatever order"


def test_http_url(lab: Lab) -> None:
    first = lab.ask(lab.linked("by-http"), WHAT)
    again = lab.ask(lab.linked("by-http"), WHAT)
    assert first.bytes_sent > 0 and again.bytes_sent == 0
    assert again.cached > 0


def test_data_uri(lab: Lab) -> None:
    first = lab.ask(lab.drawn("by-data-uri"), WHAT)
    again = lab.ask(lab.drawn("by-data-uri"), WHAT)
    assert first.bytes_sent > 0 and again.bytes_sent == 0
    assert again.cached > 0


def test_http_and_data_uri_share_blocks(lab: Lab) -> None:
    by_http = lab.ask(lab.linked("both-ways"), WHAT)
    by_data = lab.ask(lab.drawn("both-ways"), WHAT)
    assert by_data.worker == by_http.worker
    assert by_data.cached > 0
    assert by_data.bytes_sent == 0
    assert text(by_data.response) == text(by_http.response)


def test_different_images_give_different_answers(router: Endpoint) -> None:
    """Without this no test would notice a wrong image."""
    answers = [text(ask(router, [image(data_uri(picture(f"answer-{n}"))), WHAT])) for n in range(6)]
    assert len(set(answers)) == len(answers)


def test_text_moves_no_media_metric(router: Endpoint) -> None:
    before = tensor_bytes(router)
    ask(router, [words("Nothing to see.")])
    assert tensor_bytes(router) == before


def tensor_bytes(router: Endpoint) -> float:
    metrics = router.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics
        if line.startswith("mmrouter_tensor_bytes_sent_total{")
    )


def test_engines_own_metrics_are_shown_with_their_workers(router: Endpoint) -> None:
    page = router.http.get("/mmrouter/workers/metrics").text
    for worker_id in WORKERS:
        assert f'vllm:num_requests_running{{worker_id="{worker_id}",' in page
        assert f'mmrouter_event_loop_delay_seconds_count{{worker_id="{worker_id}"}}' in page


def test_metrics_have_their_names(router: Endpoint) -> None:
    exposed = httpx.get(f"{router.url}/metrics").text
    for name in (
        "mmrouter_requests_total",
        "mmrouter_time_to_first_token_seconds_bucket",
        "mmrouter_stage_seconds_bucket",
        "mmrouter_hf_processor_runs",
        "mmrouter_tensor_bytes_sent_total",
        "mmrouter_predicted_cached_tokens_total",
        "mmrouter_realised_cached_tokens_total",
        "mmrouter_decisions_total",
        "mmrouter_workers",
    ):
        assert f"\n{name}{{" in exposed or f"\n{name} " in exposed, name
    assert "\nhttp_requests_total" in exposed, "vLLM's own stay"

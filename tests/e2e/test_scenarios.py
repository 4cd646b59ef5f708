"""The ten scenarios: who answers, what is cached, what travels, and that it is right.

Every answer is compared with what a plain vLLM gives to the same request.
"""

from itertools import pairwise
from typing import Any

from openai.types.chat import ChatCompletion

from tests.e2e.conftest import Endpoint
from tests.pictures import data_uri, picture

BLOCK_SIZE = 32


class Asked:
    """One chat request, its answer and what the router did about it."""

    def __init__(self, router: Endpoint, plain: Endpoint, content: list[dict[str, Any]]) -> None:
        hf_before = hf_runs(router)
        self.response = ask(router, content)
        self.hf_runs = {side: n - hf_before[side] for side, n in hf_runs(router).items()}
        self.decision = router.decision(self.response.id)
        expected = ask(plain, content)
        assert text(self.response) == text(expected)
        assert usage(self.response).prompt_tokens == usage(expected).prompt_tokens

    @property
    def worker(self) -> str:
        return str(self.decision["worker_id"])

    @property
    def cached(self) -> int:
        details = usage(self.response).prompt_tokens_details
        assert details is not None
        return details.cached_tokens or 0

    @property
    def bytes_sent(self) -> int:
        media: Any = self.decision["media"]
        return sum(item["nbytes"] for item in media)


def ask(endpoint: Endpoint, content: list[dict[str, Any]]) -> ChatCompletion:
    return endpoint.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],  # type: ignore[typeddict-item,list-item]
        max_tokens=8,
        temperature=0,
    )


def text(response: ChatCompletion) -> str:
    content = response.choices[0].message.content
    assert content
    return content


def usage(response: ChatCompletion) -> Any:
    assert response.usage is not None
    return response.usage


def hf_runs(router: Endpoint) -> dict[str, int]:
    """HF processor runs of the frontend and of all workers together."""
    runs = {"frontend": 0, "worker": 0}
    for line in router.http.get("/metrics").text.splitlines():
        if line.startswith("mmrouter_hf_processor_runs{"):
            side = "frontend" if 'side="frontend"' in line else "worker"
            runs[side] += int(float(line.rsplit(" ", 1)[1]))
    return runs


def words(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def drawn(name: str) -> dict[str, Any]:
    return image(data_uri(picture(name)))


def test_text_only(router: Endpoint, plain: Endpoint) -> None:
    question = "Tell me about the river and the tall old tree. " * 6
    first = Asked(router, plain, [words(question)])
    again = Asked(router, plain, [words(question)])
    assert first.cached == 0 and first.bytes_sent == 0
    assert again.worker == first.worker
    assert again.cached >= BLOCK_SIZE
    assert first.hf_runs == again.hf_runs == {"frontend": 0, "worker": 0}


def test_one_image(router: Endpoint, plain: Endpoint) -> None:
    asked = Asked(router, plain, [drawn("one"), words("What is this?")])
    assert asked.bytes_sent > 0
    assert asked.hf_runs == {"frontend": 1, "worker": 0}


def test_the_same_image_again(router: Endpoint, plain: Endpoint) -> None:
    content = [drawn("again"), words("What is this?")]
    first = Asked(router, plain, content)
    again = Asked(router, plain, content)
    assert again.worker == first.worker
    assert again.cached > 0
    assert again.cached == again.decision["predicted_cached_tokens"]
    assert again.bytes_sent == 0
    assert again.hf_runs == {"frontend": 0, "worker": 0}


def test_the_same_image_twice_in_a_prompt(router: Endpoint, plain: Endpoint) -> None:
    single = Asked(router, plain, [drawn("twice-alone"), words("Look.")])
    twice = Asked(router, plain, [drawn("twice"), words("and"), drawn("twice")])
    assert 0 < twice.bytes_sent < 1.5 * single.bytes_sent


def test_another_image(router: Endpoint, plain: Endpoint) -> None:
    first = Asked(router, plain, [drawn("this"), words("What is this?")])
    other = Asked(router, plain, [drawn("that"), words("What is this?")])
    assert text(first.response) != text(other.response)
    assert other.cached < BLOCK_SIZE  # nothing from the image on is shared
    assert other.bytes_sent > 0


def test_several_images(router: Endpoint, plain: Endpoint) -> None:
    asked = Asked(
        router, plain, [drawn("a"), words("and"), drawn("b"), drawn("c"), words("Compare.")]
    )
    media: Any = asked.decision["media"]
    assert len(media) == 3
    assert asked.hf_runs["worker"] == 0


def test_staircase(router: Endpoint, plain: Endpoint) -> None:
    steps = [drawn("stair-1"), drawn("stair-2"), drawn("stair-3")]
    asked = [Asked(router, plain, steps[: n + 1]) for n in range(3)]
    assert len({step.worker for step in asked}) == 1
    assert asked[0].cached < asked[1].cached < asked[2].cached
    for before, after in pairwise(asked):
        media: Any = after.decision["media"]
        assert sum(item["nbytes"] > 0 for item in media) == 1, "only the new image travels"
        assert after.cached >= usage(before.response).prompt_tokens // 2


def test_swapped_order_does_not_hit(router: Endpoint, plain: Endpoint) -> None:
    one, two = drawn("swap-1"), drawn("swap-2")
    first = Asked(router, plain, [one, two, words("Compare.")])
    swapped = Asked(router, plain, [two, one, words("Compare.")])
    assert swapped.cached < BLOCK_SIZE
    assert swapped.decision["overlap_blocks"] == 0
    assert first.worker == swapped.worker, "it holds both images"
    assert swapped.bytes_sent == 0, "in whatever order"


def test_http_url(router: Endpoint, plain: Endpoint, pictures_url: str) -> None:
    content = [image(f"{pictures_url}/by-http.png"), words("What is this?")]
    first = Asked(router, plain, content)
    again = Asked(router, plain, content)
    assert first.bytes_sent > 0 and again.bytes_sent == 0
    assert again.cached > 0


def test_data_uri(router: Endpoint, plain: Endpoint) -> None:
    content = [drawn("by-data-uri"), words("What is this?")]
    assert Asked(router, plain, content).bytes_sent > 0
    assert Asked(router, plain, content).cached > 0


def test_http_and_data_uri_share_blocks(
    router: Endpoint, plain: Endpoint, pictures_url: str
) -> None:
    question = words("What is this?")
    by_http = Asked(router, plain, [image(f"{pictures_url}/both-ways.png"), question])
    by_data = Asked(router, plain, [drawn("both-ways"), question])
    assert by_data.worker == by_http.worker
    assert by_data.cached > 0
    assert by_data.bytes_sent == 0
    assert text(by_data.response) == text(by_http.response)


def test_different_images_give_different_answers(router: Endpoint) -> None:
    """Without this no test would notice a wrong image."""
    answers = [text(ask(router, [drawn(f"answer-{n}"), words("What is this?")])) for n in range(6)]
    assert len(set(answers)) == len(answers)

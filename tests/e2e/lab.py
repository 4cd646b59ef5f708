"""A frontend and a plain vLLM that are asked the same."""

from dataclasses import dataclass
from typing import Any

from openai.types.chat import ChatCompletion

from tests.e2e.conftest import Endpoint
from tests.pictures import data_uri, picture

WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "shm": ([], {}),
    # Also by another process than the frontend, which must make no difference.
    "nixl": (["--preprocess-workers=1"], {"DYNAMO_MM_TRANSFER": "nixl"}),
    "inline": (["--mm-arena-gb=0"], {}),
    "reference": ([], {"DYNAMO_DISABLE_NIXL_MM": "1"}),
}
"""How media travel, and what makes a frontend choose it."""


@dataclass(frozen=True)
class Lab:
    """A frontend whose media travel in one way, and a plain vLLM to compare with."""

    way: str
    router: Endpoint
    plain: Endpoint
    pictures_url: str

    @property
    def ways(self) -> set[str]:
        """How media may travel."""
        return {self.way}

    def ask(self, *content: dict[str, Any], **options: Any) -> "Asked":
        return Asked(self, list(content), options)

    # Each way has pictures of its own: the workers are shared and remember.

    def drawn(self, name: str) -> dict[str, Any]:
        return image(data_uri(picture(f"{self.way}-{name}")))

    def linked(self, name: str) -> dict[str, Any]:
        return image(f"{self.pictures_url}/{self.way}-{name}.png")


class Asked:
    """One chat request, its answer and what the router did about it."""

    def __init__(self, lab: Lab, content: list[dict[str, Any]], options: dict[str, Any]) -> None:
        hf_before = hf_runs(lab.router)
        self.response = ask(lab.router, content, **options)
        self.hf_runs = {side: n - hf_before[side] for side, n in hf_runs(lab.router).items()}
        self.decision = lab.router.decision(self.response.id)
        expected = ask(lab.plain, content, **options)
        assert text(self.response) == text(expected)
        assert usage(self.response).prompt_tokens == usage(expected).prompt_tokens
        assert {move["transport"] for move in self.shipped} <= lab.ways
        # Only a worker that was sent the media themselves has to process them.
        by_worker = sum(move["transport"] == "reference" for move in self.shipped)
        assert self.hf_runs["worker"] == by_worker

    @property
    def worker(self) -> str:
        return str(self.decision["worker_id"])

    @property
    def cached(self) -> int:
        details = usage(self.response).prompt_tokens_details
        assert details is not None
        return details.cached_tokens or 0

    @property
    def media(self) -> list[dict[str, Any]]:
        moves: Any = self.decision["media"]
        return list(moves)

    @property
    def shipped(self) -> list[dict[str, Any]]:
        return [move for move in self.media if move["how"] != "held"]

    @property
    def bytes_sent(self) -> int:
        return sum(move["nbytes"] for move in self.media)


def ask(endpoint: Endpoint, content: list[dict[str, Any]], **options: Any) -> ChatCompletion:
    """Ask for a short, determined answer; options are fields that OpenAI's API doesn't have."""
    return endpoint.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
        max_tokens=8,
        temperature=0,
        extra_body=options,
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


def leased(router: Endpoint) -> int:
    """Arena segments that are leased out."""
    for line in router.http.get("/metrics").text.splitlines():
        if line.startswith("mmrouter_arena_leases "):
            return int(float(line.split()[1]))
    raise AssertionError("no such metric")


def words(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}

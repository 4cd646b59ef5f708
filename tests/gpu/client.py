"""A client that asks about pictures, and what mmrouter says about its own decisions."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        tokens: as text, one each.
        cached: prompt tokens that were in the KV cache.
        closest: the smallest distance of log-probability between a token and the next likely one.
    """

    response_id: str
    tokens: tuple[str, ...]
    cached: int
    closest: float


class Client:
    """Of one server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)

    def ask(self, pictures: Sequence[str], question: str, tokens: int = 24) -> Answer:
        """Ask about pictures, given as data URIs."""
        body = _body(pictures, question, tokens, logprobs=True, top_logprobs=2)
        reply = self._http.post("/v1/chat/completions", json=body)
        reply.raise_for_status()
        said = reply.json()
        steps = said["choices"][0]["logprobs"]["content"]
        pairs = ([top["logprob"] for top in step["top_logprobs"]] for step in steps)
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(
            said["id"],
            tuple(step["token"] for step in steps),
            details.get("cached_tokens") or 0,
            min(first - second for first, second in pairs),
        )

    def first_token(self, pictures: Sequence[str], question: str) -> tuple[float, str]:
        """Milliseconds to the first text of a stream, and the id of the response."""
        body = _body(pictures, question, 4, stream=True)
        began, first, response_id = time.perf_counter(), None, ""
        with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            for event in reply.iter_lines():
                if not event.startswith("data: {"):
                    continue
                chunk = json.loads(event.removeprefix("data: "))
                response_id = chunk["id"]
                choices = chunk["choices"]
                # A token may be a part of a character, whose text comes with a later one.
                shows = choices and (
                    choices[0]["delta"].get("content") or choices[0]["finish_reason"]
                )
                if first is None and shows:
                    first = (time.perf_counter() - began) * 1e3
        if first is None:
            raise RuntimeError(f"the stream {response_id} has no token")
        return first, response_id

    def decision(self, response_id: str) -> dict[str, Any]:
        """What the router decided about a response."""
        reply = self._http.get("/mmrouter/decisions", params={"request_id": response_id})
        reply.raise_for_status()
        (found,) = reply.json()
        return dict(found)

    def ways(self, response_id: str) -> list[str]:
        """How the media of a response got to the worker: by a transport, or why by none."""
        media = self.decision(response_id)["media"]
        return [medium["transport"] or medium["how"] for medium in media]

    def transports(self) -> dict[str, str | None]:
        """The transport to each worker whose cache the frontend knows."""
        if self._http.get("/health").status_code != 200:
            return {}  # it has still to load its model
        workers = self._http.get("/mmrouter/workers").json()
        return {
            worker["worker_id"]: worker["transport"]
            for worker in workers
            if worker["ranks"] and all(rank["index"] == "exact" for rank in worker["ranks"])
        }

    def metrics(self) -> str:
        reply = self._http.get("/metrics")
        reply.raise_for_status()
        return reply.text

    def close(self) -> None:
        self._http.close()


def _body(pictures: Sequence[str], question: str, tokens: int, **more: object) -> dict[str, object]:
    content: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": each}} for each in pictures
    ]
    content.append({"type": "text", "text": question})
    body: dict[str, object] = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return body | more

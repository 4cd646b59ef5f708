"""Asks both servers the same, and says in what their answers differ."""

from collections.abc import Mapping
from typing import Any

import httpx

from tests.e2e.lab import WAYS
from tests.families.questions import Question
from tests.families.results import Answer
from tests.families.stack import Servers

ANSWER_S = 120.0
TOKENS = 8
REFERENCE = "reference"
BREAKS = "Failed to apply"
"""How vLLM's message begins when a Hugging Face processor has raised something."""


def compare(
    servers: Servers, way: str, question: Question, client: httpx.Client, *, cached: bool
) -> Answer:
    """Ours first.

    Args:
        cached: whether both must have as many tokens in their caches.

    Raises:
        httpx.HTTPError: there is no answer at all.
    """
    url = servers.frontends[way].url
    runs = _hf_runs(url, client)
    ours = _ask(url, question, client)
    theirs = _ask(servers.plain.url, question, client)
    statuses = theirs.status_code, ours.status_code
    if statuses != (200, 200):
        differs, said = differing_refusals(ours, theirs), _message(theirs)
        if question.medium == "other":
            alike = (ours.status_code, _complaint(ours)) == (theirs.status_code, _complaint(theirs))
            differs = [] if alike else differs or [f"ours {_message(ours)}, plain {said}"]
        return Answer(way, question.medium, question.name, differs, *statuses, said)
    answer, expected = ours.json(), theirs.json()
    differs = _differing_answers(answer, expected, cached=cached)
    decision = _decision(url, str(answer["id"]), client)
    differs += _mispredicted(answer, decision)
    differs += travelled(way, decision, _hf_runs(url, client) - runs)
    return Answer(
        way, question.medium, question.name, differs, *statuses, _text(expected)[:80],
        _cached(answer), answer["usage"]["prompt_tokens"],
    )  # fmt: skip


def _ask(url: str, question: Question, client: httpx.Client) -> httpx.Response:
    message = [{"role": "user", "content": question.content}]
    asked = {"prompt_embeds": question.alone} if question.alone else {"messages": message}
    body = asked | {
        "model": "demo",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    path = "completions" if question.alone else "chat/completions"
    # After a 500, vLLM's server drops the connection, at some moment of the next request.
    headers = {"Connection": "close"}
    return client.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=ANSWER_S)


def _message(reply: httpx.Response) -> str:
    return reply.text[:200]


def _complaint(reply: httpx.Response) -> str:
    return str(reply.json().get("error", {}).get("message"))


def differing_refusals(ours: httpx.Response, theirs: httpx.Response) -> list[str]:
    """Both may refuse. Where plain vLLM's processor breaks, ours may say so, or may answer, because
    it is given one medium at a time."""
    if ours.status_code == theirs.status_code < 500:
        return []
    broken = theirs.status_code >= 500 or BREAKS in theirs.text
    if broken and ours.status_code < 500:
        return []
    said = f"ours {ours.status_code} {_message(ours)}"
    return [f"{said}; plain {theirs.status_code} {_message(theirs)}"]


def _differing_answers(ours: dict[str, Any], theirs: dict[str, Any], *, cached: bool) -> list[str]:
    pairs: dict[str, tuple[object, object]] = {
        "text": (_text(ours), _text(theirs)),
        "prompt tokens": (ours["usage"]["prompt_tokens"], theirs["usage"]["prompt_tokens"]),
    }
    if cached:
        pairs["cached tokens"] = (_cached(ours), _cached(theirs))
    return [
        f"{what}: ours {one!r}, plain {other!r}"
        for what, (one, other) in pairs.items()
        if one != other
    ]


def _text(body: dict[str, Any]) -> str:
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _cached(body: dict[str, Any]) -> int:
    return int((body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _decision(url: str, request: str, client: httpx.Client) -> dict[str, Any]:
    reply = client.get(f"{url}/mmrouter/decisions", params={"request_id": request})
    reply.raise_for_status()
    (decision,) = reply.json()
    return dict(decision)


def _mispredicted(answer: dict[str, Any], decision: Mapping[str, Any]) -> list[str]:
    predicted = decision["predicted_cached_tokens"]
    if predicted == _cached(answer):
        return []
    return [f"predicted {predicted} cached tokens, realised {_cached(answer)}"]


def travelled(way: str, decision: Mapping[str, Any], hf_runs: int) -> list[str]:
    """Only a worker that was sent the media themselves has to process them."""
    shipped = [move["transport"] for move in decision["media"] if move["how"] != "held"]
    by_reference = sum(transport == REFERENCE for transport in shipped)
    differs = []
    if set(shipped) - ({way, "inline"} if way == REFERENCE else {way}):
        differs.append(f"media travelled by {', '.join(sorted(set(shipped)))}")
    if hf_runs != by_reference:
        differs.append(f"the worker ran its processor {hf_runs} times for {by_reference} media")
    return differs


def _hf_runs(url: str, client: httpx.Client) -> int:
    (view,) = client.get(f"{url}/mmrouter/workers").json()
    return int(view["hf_processor_runs"] or 0)


def index_of(servers: Servers, client: httpx.Client) -> str:
    """How far frontends know the worker's cache."""
    states = set()
    for way in WAYS.keys() & servers.frontends.keys():
        (view,) = client.get(f"{servers.frontends[way].url}/mmrouter/workers").json()
        states |= {str(rank["index"]) for rank in view["ranks"]}
    return ", ".join(sorted(states))
